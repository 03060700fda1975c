"""The house: imports run one way, files stay small, the package prints nothing and imports lightly."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_hybrid"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import from modules of its own floor or below. `prediction` knows no config and no trainer.
FLOORS = [
    {
        "arguments",
        "phases",
        "memory.accounting",
        "memory.int8_rows",
        "memory.layers",
        "memory.loss",
        "memory.low_bit",
        "memory.request",
        "memory.transfers",
        "micro_batches",
        "optimizers",
        "processes",
        "summaries",
    },
    {"memory.fit", "memory.slots", "memory.storage"},
    {"memory.units"},
    {"memory.streaming"},
    {"memory.lazy_update", "memory.walk"},
    {
        "plugins",
        "records",
        "prediction.signals",
        "prediction.directions.base",
        "prediction.directions.preconditioners",
        "prediction.forecasts",
        "prediction.gains",
        "prediction.residuals",
        "prediction.tail",
        "prediction.sums",
        "prediction.verifier",
        "prediction.rescue",
    },
    {"memory.checkpointing", "memory.guard", "memory.quantize", "memory.states"},
    {"memory.precision"},
    {
        "prediction.directions.drift",
        "prediction.directions.extrapolation",
        "prediction.directions.gradient_memory",
        "prediction.directions.history",
        "prediction.directions.nino",
        "prediction.directions.orthogonal",
    },
    {"prediction.directions.registry"},
    {"prediction.divergence", "prediction.trajectory"},
    {"prediction.rssm"},
    {"prediction.rssm_training"},
    {"prediction.replay", "prediction.rssm_records"},
    {"prediction.dynamics"},
    {"prediction.imagination", "prediction.leaps"},
    {"prediction.leaper"},
    {"prediction.engine"},
    {"state_io", "data", "probing", "callbacks", "clocks", "notebooks", "resuming"},
    # What a run left behind, drawn and told.
    {"profiling.out_of_memory", "profiling.run_folder", "profiling.run_log", "profiling.snapshots"},
    {"profiling.drawing", "profiling.findings", "profiling.sources", "profiling.totals"},
    {"profiling.calibration_plot", "profiling.callback", "profiling.html"},
    {"profiling.plots"},
    {"profiling.report"},
    {"hub.facts", "hub.markdown", "hub.provenance"},
    {"hub.limits", "hub.metadata"},
    {"hub.card"},
    # What a run would need.
    {"planning.adapters", "planning.attention", "planning.setups", "planning.sizes", "planning.tracker"},
    {"planning.models", "planning.step"},
    {"planning.replay"},
    {"planning.plans"},
    {"planning.floors"},
    {"config", "recovery"},
    {"hub.publishing", "memory_setup", "phase_recovery", "step_recovery"},
    {"assembly", "streamed_trainer"},
    {"recovering_trainer"},
    {"trainer"},
    {"integrations.axolotl", "integrations.trl"},
    {"cli.options"},
    {"scripts.models", "scripts.text_blocks"},
    {"scripts.train"},
    {"cli.env", "cli.plan", "cli.report", "cli.train"},
    {"cli.main"},
    {"__main__"},
]
OPEN = {
    "__init__",
    *(f"{folder}.__init__" for folder in ("cli", "hub", "integrations", "memory", "planning", "prediction")),
    *(f"{folder}.__init__" for folder in ("prediction.directions", "profiling", "scripts")),
}
FOLDERS = ("hf_hybrid.memory", "hf_hybrid.planning", "hf_hybrid.prediction", "hf_hybrid.profiling", "hf_hybrid.cli")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hf_hybrid"):
            names = (
                [node.module]
                if node.module != "hf_hybrid"
                else [f"hf_hybrid.{a.name}" for a in node.names if a.name != "__version__"]
            )
            if node.module in FOLDERS:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name.removeprefix("hf_hybrid.") for name in names)
    return found


def test_prediction_and_memory_do_not_know_each_other():
    for path in FILES:
        for imported in imports(path):
            halves = {module_name(path).split(".")[0], imported.split(".")[0]}
            assert halves != {"prediction", "memory"}, f"{module_name(path)} imports {imported}"


def floor(name: str) -> int:
    return next(index for index, names in enumerate(FLOORS) if name in names)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_arrows_run_one_way(path):
    name = module_name(path)
    if name in OPEN:
        return
    assert any(name in names for names in FLOORS), f"`{name}` has no floor: add it to FLOORS"
    for imported in imports(path):
        assert floor(imported) <= floor(name), f"`{name}` imports `{imported}`, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 450, "over 400 lines wants a reason"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is {node.end_lineno - node.lineno + 1} lines long"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_public_things_are_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "every module says what it is for"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"`{node.name}` has no docstring"


def test_import_is_light_and_everything_public_is_there():
    code = (
        "import sys, hf_hybrid\n"
        "assert not {'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert all(getattr(hf_hybrid, name) is not None for name in hf_hybrid.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lazy_names_are_those_that_type_checkers_see():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    checked = next(node.body for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name: node.module for node in checked for alias in node.names}
    assert seen == ast.literal_eval(assigned["_LAZY"])
    needs_trl = {name for name, module in seen.items() if module == "hf_hybrid.integrations.trl"}
    assert set(ast.literal_eval(assigned["__all__"])) == set(seen) - needs_trl | {"__version__"}


def test_every_module_is_in_the_table_of_the_house():
    table = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## The house")[1].split("\n## ")[0]
    for path in FILES:
        told = f"{path.name}`" in table or f"{path.parent.name}/`" in table
        assert told or path.name.startswith("__"), f"say in CONTRIBUTING.md what `{module_name(path)}` is for"
