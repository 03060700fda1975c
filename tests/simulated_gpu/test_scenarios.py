"""
What the package does on a device, without one (device.py says what that shows and what it cannot show).

Each scenario runs in processes of its own, on the simulated device and beside it; the tests ask what it left. `-k NAME`
runs the scenarios of that name alone.
"""

import itertools

import pytest

from simulated_gpu.results import Results
from simulated_gpu.scenarios import SCENARIOS, SLOW, places

pytestmark = pytest.mark.simulated
SMALL_CHANGE = 64
"""Bytes on the device that a process may keep: placeholders and scalars."""


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    here = [item for item in request.session.items if item.fspath == request.path]
    asked = {name for item in here for mark in item.iter_markers("needs") for name in mark.args}
    if any(not list(item.iter_markers("needs")) for item in here):
        asked |= set(ALWAYS)
    made = Results([name for name in SCENARIOS if name in asked], tmp_path_factory.mktemp("scenarios"))
    yield made
    made.end()


def needs(*names: str):
    """The scenarios that a test looks at."""
    return pytest.mark.needs(*names)


def marked(names, beside: str = "{}") -> list:
    """The scenarios as parameters, with one that each needs beside it; some are slow."""

    def marks(*asked: str) -> list:
        return [needs(*asked)] + [pytest.mark.slow] * any(name in SLOW for name in asked)

    return [pytest.param(name, marks=marks(name, beside.format(name))) for name in names]


each = pytest.mark.parametrize("name", marked(SCENARIOS))
ALWAYS = [name for name in SCENARIOS if name not in SLOW]


@each
def test_nothing_races(name, results):
    races = results.of(name)["races"]
    assert not races, "\n".join(f"{count} x {race}" for race, count in races.items())


@each
def test_the_weights_are_those_of_the_other_place(name, results):
    scenario = SCENARIOS[name]
    here, there = (results.of(name, place)["weights"] for place in places(name))
    assert here.keys() == there.keys()
    off = {key: (here[key] - there[key]).abs().max().item() for key in here}
    wrong = {key: value for key, value in off.items() if not value <= scenario.tolerance}
    assert not wrong, f"more than {scenario.tolerance} from {scenario.beside}: {wrong}"


@needs("layers_4", "layers_8")
def test_what_leaves_the_device_does_not_pile_up_on_it(results):
    """The host runs ahead of the device. Gradients of several layers must not wait there for their copies."""
    grown = {name: results.of(name)["facts"]["grown"] for name in ("layers_4", "layers_8")}
    one_layer = 4 * (4 * 32 * 32 + 3 * 32 * 64)
    assert 0 < grown["layers_8"] <= grown["layers_4"] + one_layer, grown


@needs("in_order")
def test_an_update_holds_up_nothing_but_its_own_layer(results):
    """What it needs comes in while the layer before computes, and what it wrote leaves while the next ones do."""
    for step in results.of("in_order")["facts"]["steps"][2:]:  # states are there from the second update on
        layers = list(dict.fromkeys(unit for what, unit, _ in step if what == "computes"))
        events = [(what, unit) for what, unit, _ in step]
        loads = {
            unit: tasks["in"] for what, unit, tasks in step if what == "begin_load" and tasks["in"][0] <= tasks["in"][1]
        }
        updates = {unit: tasks["out"] for what, unit, tasks in step if what == "update"}
        assert len(layers) == 5 and updates.keys() >= {*layers, "embeddings", "head"}
        waits = {unit: tasks for what, unit, tasks in step if what == "computes"}
        for layer, following in itertools.pairwise(layers):
            assert events.index(("begin_load", following)) < events.index(("computes", layer)), "on the way already"
            assert events.index(("update", following)) > events.index(("computes", layer))
            assert waits[layer]["in"] < loads[following][0], "computation does not wait for what the next update needs"
            assert waits[following]["out"] < updates[layer][0], "nor for what the last one wrote"


@needs("in_order_in_backward")
def test_an_update_in_the_backward_pass_holds_up_nothing_but_its_own_layer(results):
    """What it needs comes in while the layer itself computes, and what it wrote leaves while the next ones do."""
    for step in results.of("in_order_in_backward")["facts"]["steps"][2:]:
        events = [(what, unit) for what, unit, _ in step]
        updates = {unit: tasks for what, unit, tasks in step if what == "update"}
        layers = [unit for unit in updates if "layers" in unit]
        assert len(layers) == 5 and layers == sorted(layers, reverse=True)
        loads = {unit: tasks["in"] for what, unit, tasks in step if what == "begin_load" and unit in layers}
        waits = {unit: tasks for what, unit, tasks in step if what == "computes"}
        for layer in layers:
            of_layer = [what for what, unit in events if unit == layer]
            assert of_layer == ["begin_load", "computes", "computes", "update"], "of two micro-batches"
            assert waits[layer]["in"] < loads[layer][0], "computation does not wait for what its own update needs"
        for layer, following in itertools.pairwise(layers):
            assert events.index(("update", layer)) < events.index(("computes", following))
            assert waits[following]["out"] < updates[layer]["out"][0], "nor for what the last one wrote"


@needs("in_order", "in_order_in_backward")
def test_the_host_does_not_stop_between_the_first_layer_and_the_last(results):
    for name in ("in_order", "in_order_in_backward"):
        for step in results.of(name)["facts"]["steps"][1:]:
            assert len({tasks["stops"] for what, _, tasks in step if what == "computes"}) == 1


@each
def test_the_host_is_seldom_stopped(name, results):
    found = results.of(name)
    stops = found["facts"].get("stops", {}).get("hf_hybrid", 0)
    sites = "\n".join(f"{n} x {site}" for site, n in found["stop_sites"].items() if site.startswith("hf_hybrid"))
    assert stops <= SCENARIOS[name].stops, f"{stops} stops in a step; all of the run:\n{sites}"


@needs("nothing_to_save_unfiltered")
def test_the_device_always_has_work(results):
    """Where Trainer does not wait for losses, nobody does: the monitor looks at a step when the next is launched."""
    found = results.of("nothing_to_save_unfiltered")
    assert found["facts"]["stops"] == {}, found["stop_sites"]
    behind = [left for site, left in found["looks"].items() if "_before_update" in site]
    assert len(behind) == 1 and behind[0] > 500


@needs("withheld")
def test_the_device_withholds_updates(results):
    """The weights are compared with those of a CPU too."""
    for place in ("device", "cpu"):
        assert results.of("withheld", place)["facts"]["withheld"] == [1, 3]


@each
def test_memory_is_given_back(name, results):
    facts = results.of(name)["facts"]
    left = facts["bytes_left"]
    assert left["device"] <= SCENARIOS[name].left and left["registered"] == left["pinned"] == 0
    if "bytes" in facts:
        before, after = facts["bytes"]
        if not SCENARIOS[name].keeps_model:
            assert after["device"] <= before["device"] + SMALL_CHANGE + SCENARIOS[name].left
        assert after["registered"] <= before["registered"]
        assert after["pinned"] <= before["pinned"] or SCENARIOS[name].locks_masters


# What single scenarios are about.


LEAPT = {"leaps": "kept", "leaps_probed": "kept", "leaps_undone": "rejected", "resident_leaps_undone": "rejected"}


@pytest.mark.parametrize("name", marked(LEAPT))
def test_leaps_are_made_kept_and_undone(name, results):
    assert LEAPT[name] in results.of(name)["facts"]["leaps"]


@pytest.mark.slow
@needs("leaps", "leaps_deeper")
def test_leaps_stop_the_host_no_oftener_in_deeper_models(results):
    assert stops_at_leaps("leaps", results) == stops_at_leaps("leaps_deeper", results)


@pytest.mark.slow
@needs("leaps_probed", "leaps_probed_deeper")
def test_probed_leaps_stop_the_host_no_oftener_in_deeper_models(results):
    assert stops_at_leaps("leaps_probed", results) == stops_at_leaps("leaps_probed_deeper", results)


def stops_at_leaps(name, results) -> int:
    return results.of(name)["facts"]["stops_at_leaps"]["hf_hybrid"]


@pytest.mark.slow
@needs("grpo", "grpo_more")
def test_grpo_stops_the_host_no_oftener_with_more_micro_batches(results):
    few, many = (results.of(name)["facts"]["stops"]["hf_hybrid"] for name in ("grpo", "grpo_more"))
    assert few == many, results.of("grpo_more")["stop_sites"]


@needs("grpo")
def test_rollouts_on_a_device_are_captured(results):
    """Both places sample the same completions, so the weights are compared too."""
    here, there = (results.of("grpo", place)["facts"]["rollouts"] for place in ("device", "cpu"))
    assert here["plain_rollouts_because"] is None and there["plain_rollouts_because"] is None
    assert here["rows_decoded"] >= there["rows_decoded"] > 0
    assert here["prompt_tokens_shared"] == there["prompt_tokens_shared"] > 0


@pytest.mark.parametrize("place", ["device", "cpu"])
@needs("rollouts_under_dropout")
def test_under_dropout_each_token_of_a_completion_draws_its_own_mask(results, place):
    """On the device a graph draws it in each replay."""
    facts = results.of("rollouts_under_dropout", place)["facts"]
    factors = facts["factors"]  # 0 or 2: [tokens, rows, values]
    assert facts["rollouts"]["plain_rollouts_because"] is None and facts["rollouts"]["prompt_tokens_shared"] > 0
    assert facts["replays"] > 50 or place == "cpu"
    assert set(factors.unique().tolist()) == {0.0, 2.0}
    tokens, rows, values = factors.shape
    assert len(factors.view(-1, values).unique(dim=0)) > 0.9 * tokens * rows
    draws = tokens * rows * values
    assert abs(factors.mean().item() - 1) < 5 / draws**0.5
    for one, other in ((factors[1:], factors[:-1]), (factors[:, 1:], factors[:, :-1])):  # tokens, completions
        assert abs(((one - 1) * (other - 1)).mean().item()) < 5 / one.numel() ** 0.5


@pytest.mark.slow
@needs("grpo_long")
def test_captured_completions_stop_the_host_once_in_eight_tokens(results):
    found = results.of("grpo_long")
    waits = sum(count for site, count in found["stop_sites"].items() if "trl/completions.py" in site)
    generations, replays = 3, found["facts"]["replays"]
    assert replays > 24 and 0 < waits <= replays / 8 + generations, found["stop_sites"]


@pytest.mark.slow
@needs("grpo_rewards_first")
def test_log_probabilities_are_skipped_on_a_device(results):
    assert results.of("grpo_rewards_first")["facts"]["rollouts"]["log_probs_skipped"] > 0


@pytest.mark.parametrize("name", marked(("by_micro_batch", "by_layer", "eight_bit"), beside="{}_more"))
def test_steps_stop_the_host_no_oftener_with_more_layers_and_micro_batches(name, results):
    few, many = (results.of(n)["facts"]["stops"].get("hf_hybrid", 0) for n in (name, f"{name}_more"))
    assert few == many, results.of(f"{name}_more")["stop_sites"]


@pytest.mark.parametrize("name", marked(("resumed", "resumed_eight_bit")))
def test_a_resumed_run_ends_with_the_weights_of_one_run(name, results):
    assert results.of(name)["facts"]["as_without"] <= {"resumed": 0, "resumed_eight_bit": 1e-6}[name]


@pytest.mark.parametrize("name", marked(("bf16", "bf16_by_micro_batch", "eight_bit_bf16")))
def test_what_is_streamed_changes_its_type_on_the_device_alone(name, results):
    """A copy between types would be two, with a buffer that nobody has planned."""
    conversions = results.of(name)["conversions"]
    assert not [one for one in conversions if "streaming" in one], conversions


@needs("registered")
def test_large_buffers_are_registered_with_the_driver(results):
    before, _ = results.of("registered")["facts"]["bytes"]
    assert before["registered"] > 0


@needs("registration_refused")
def test_a_driver_that_locks_no_pages_is_survived(results):
    assert "Host memory could not be page-locked" in results.of("registration_refused")["log"]


@needs("evaluated_only")
def test_an_evaluation_alone_is_right(results):
    here, there = (results.of("evaluated_only", place)["facts"] for place in ("device", "cpu"))
    assert here["losses"] == pytest.approx(there["losses"], abs=1e-6)
    assert here["predicted"] == pytest.approx(there["predicted"], rel=1e-5)


@pytest.mark.parametrize("name", marked(name for name in SCENARIOS if name.startswith("out_of_memory")))
def test_memory_may_end_at_any_allocation(name, results):
    """Most often the work is repeated to the same loss; otherwise the training ends with the error, and not a race."""
    facts = results.of(name)["facts"]
    assert facts["ended"] and facts["allocations"] > 250
    assert facts["caught"] + len(facts["errors"]) >= facts["tried"]
    assert len(facts["errors"]) <= facts["tried"] // 3  # a step of the optimizer that was cut short is no step
    if "leaps" not in name:  # a leap that does not fit is not made
        assert facts["off"] < 1e-5


@needs("walk_that_does_not_fit")
def test_a_window_that_does_not_fit_is_computed_again(results):
    assert results.of("walk_that_does_not_fit")["facts"]["caught"] == 1


@needs("within_the_device", "within_less_than_planned")
def test_as_few_layers_are_recomputed_as_fit_the_device(results):
    """The device refuses what is over its limit: what was planned fits, and what was not is tightened until it fits."""
    planned, tightened = (results.of(name)["facts"] for name in ("within_the_device", "within_less_than_planned"))
    assert planned["actions"] == [] and planned["recomputed"] == 3
    assert [action[:6] for action in tightened["actions"]] == ["2 of 6", "4 of 6"] and tightened["recomputed"] == 4


@needs("graphs_within_the_device", "graphs_that_do_not_fit")
def test_as_many_graphs_are_kept_as_fit_the_device(results):
    planned, recomputed = (results.of(name)["facts"] for name in ("graphs_within_the_device", "graphs_that_do_not_fit"))
    assert planned["graphs"] == 9 and planned["actions"] == []
    assert planned["peak"][0] == pytest.approx(planned["peak"][1], rel=0.01), "held, and planned"
    assert recomputed["graphs"] == 18 and recomputed["actions"] == ["activation checkpointing"]


@pytest.mark.parametrize("name", marked(("pictures", "pictures_lora")))
def test_what_a_plan_counts_of_pictures_is_there(name, results):
    held, planned = results.of(name)["facts"]["peak"]
    assert held == pytest.approx(planned, rel=0.05)


OF_TRL = ["gkd_chunks", "gkd_streamed", "orpo_streamed", "reward_streamed"]


@pytest.mark.parametrize("name", marked(["dpo_streamed", "dpo_streamed_lora", "teachers_1", "teachers_4", *OF_TRL]))
def test_what_a_plan_counts_of_evaluated_models_is_there(name, results):
    held, planned = results.of(name)["facts"]["peak"]
    # Of passes beside micro-batches a plan counts hidden states, not masks and rotations: KTO has three of them.
    assert held == pytest.approx(planned, rel=0.05)


@pytest.mark.slow
@needs("kto_streamed")
def test_passes_beside_micro_batches_hold_more_than_hidden_states(results):
    """A plan counts these of KTO's three, and not their masks and rotations."""
    held, planned = results.of("kto_streamed")["facts"]["peak"]
    assert planned < held < 1.06 * planned


@pytest.mark.parametrize("name", marked(["grpo_peak_lora", "grpo_peak_lora_reference", "grpo_peak_reference"]))
def test_what_a_plan_counts_of_grpo_is_there(name, results):
    held, planned = results.of(name)["facts"]["peak"]
    assert held == pytest.approx(planned, rel=0.05)


@pytest.mark.slow
@needs("grpo_peak")
def test_grpo_without_reference_holds_less_than_planned(results):
    """Updates come in as completions begin. No activations of a micro-batch are there then, and no gradients leave."""
    held, planned = results.of("grpo_peak")["facts"]["peak"]
    assert 0.8 * planned < held < planned


@pytest.mark.slow
@needs("grpo_again")
def test_a_window_of_grpo_that_does_not_fit_is_computed_again(results):
    """With the completions that are there; the weights are compared with those of a CPU that had the memory."""
    assert results.of("grpo_again")["facts"]["actions"] == ["split micro-batches"]


@needs("teachers_1", "teachers_4")
def test_four_teachers_have_the_peak_of_one(results):
    """Layers, embeddings and heads of all of them come in through the same slots."""
    one, four = (results.of(name)["facts"]["peak"][0] for name in ("teachers_1", "teachers_4"))
    assert four - one <= 1024, (one, four)


@needs("gkd_within")
def test_a_student_and_two_layers_of_its_teacher_are_enough(results):
    assert results.of("gkd_within")["facts"]["actions"] == []


@needs("profiled")
def test_the_profiler_reads_allocator_and_driver(results):
    record = results.of("profiled")["facts"]["records"][-1]
    assert record["device"]["peak_allocated"] >= record["device"]["allocated"] > 0
    assert record["nvml"] == {"used": 3 << 30, "total": 16 << 30}
    assert record["host"]["pinned"] > 0


@needs("sampled")
def test_the_summary_says_what_share_the_device_computed(results):
    summary = results.of("sampled")["facts"]["summary"]
    assert summary["device_share"] == 0.38 and summary["tokens_per_second"] > 0
    assert summary["speed_hint"].startswith("The host is the limit: the device computed in 38 % of the time. A larger")
    assert results.of("sampled", "cpu")["facts"]["summary"]["device_share"] is None


@needs("guarded")
def test_the_guard_asks_for_a_checkpoint(results):
    assert results.of("guarded")["facts"]["checkpoints"] == 1
    assert "memory" in results.of("guarded")["log"]


@needs("hashed")
def test_a_flipped_bit_changes_one_hash(results):
    assert results.of("hashed")["facts"]["hashes"] == {"of one flip": [1], "without": True}


@needs("measured")
def test_the_machine_is_measured(results):
    facts = results.of("measured")["facts"]
    assert "Simulated GPU, 16.0 GiB" in facts["environment"]
    assert facts["bf16"] is True and facts["free"] == 16 << 30


@needs("told")
def test_profiler_and_card_speak_of_the_device(results):
    facts = results.of("told")["facts"]
    assert facts["profile"]["where"] == "device"
    assert "Simulated GPU" in facts["card"]


# What no scenario entered.

ONLY_ELSEWHERE = {
    "trl/captured.py: generator = torch.cuda.default_generators[device.index]": (
        "tests/trl/test_captured.py: an error in a capture"
    ),
    "trl/decoding.py: if base.device.type != 'cpu'": "devices without graphs",
    "trl/decoding.py: return f'passes are not captured on `{base.device.type}`, and fewer rows are not faster there'": (
        "devices without graphs"
    ),
    "machine.py: if torch.cuda.device_count() > 1": "the command line, before it trains",
    "cli/console.py: plan, where = (trainer.memory.plan, 'host' if args.device.type == 'cpu' else 'device')": (
        "the command line"
    ),
    "machine.py: visible = os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',')[0]": "several devices",
    "machine.py: return None": "devices that do not tell their free memory",
    "machine.py: return asked or not torch.accelerator.is_available()": "FSDP, which tests/test_machine.py asks for",
    "plan/setups.py: if self.vram is None or self.accelerator != 'cuda'": "`hf-hybrid plan`, which needs no device",
    "plan/setups.py: return self.vram": "`hf-hybrid plan`, which needs no device",
    "recovery.py: return None": "a CPU, which nothing watches",
    **dict.fromkeys(
        (
            "rows/attention.py: if kind != 'cuda'",
            "rows/attention.py: return (flex_attention, create_block_mask)",
            "rows/attention.py: parts = torch.from_numpy(parts).to(self.device, non_blocking=True)",
        ),
        "tests/rows/test_attention.py, without a gradient; its kernels need a real GPU",
    ),
    **dict.fromkeys(
        (
            "rows/recurrent.py: layout.passes[least] = cls(each, *(tensor.to(layout.device, non_blocking=True) for "
            "tensor in flat))",
            "rows/recurrent.py: starts = starts.to(layout.device, non_blocking=True) if starts.any() else None",
        ),
        "tests/rows/test_layers_with_state.py, on a CPU",
    ),
    **dict.fromkeys(
        (
            "rows/images.py: found[name] = (joined[None] if self._by_row else joined).to(device, non_blocking=True)",
            "rows/windows.py: inputs |= send_to_device(batch.images.padded(*batch[:2]), self.trainer.args.device, "
            "non_blocking=True)",
        ),
        "the scenario `pictures_shared`, which is slow",
    ),
    "trl/groups.py: before = tokens_before[(part // size).to(advantages.device, non_blocking=True)]": (
        "losses that are means over tokens (tests/trl/test_grpo.py), on a CPU"
    ),
    "trl/rl.py: return f'with `{self._sharding}` processes generate in step'": "FSDP2 (tests/trl/test_on_processes.py)",
    "rows/tree.py: return list(tensors)": "a CPU",
    "hub/provenance.py: if device != 'cpu'": "MPS, of which torch tells no name",
    "hub/provenance.py: parts = {'Accelerator': f'{devices} x {device}', **parts}": "MPS",
    "saving/run_identity.py: continue": "weights on the disk",
    "saving/run_identity.py: device = {'device': torch.backends.cpu.get_cpu_capability(), 'threads': "
    "torch.get_num_threads()}": "a CPU",
    **dict.fromkeys(
        (
            "trl/host_reads.py: has_kernel = device.type == 'cuda' and torch.cuda.get_device_capability(device)[0] in "
            "(9, 10)",
            "trl/host_reads.py: return device.type != 'cpu' and (not (has_kernel and in_bf16))",
        ),
        "products in groups (tests/trl/test_captured.py)",
    ),
}
"""Device-dependent lines that the simulated device cannot enter, each with where it is entered."""
NOT_HERE = ("has no streams", "needs a device with streams")
"""Errors about MPS, which has no streams."""


def test_every_device_dependent_line_is_entered(results, request):
    selected = [item for item in request.session.items if item.fspath == request.path]
    names = {item.callspec.params.get("name") for item in selected if hasattr(item, "callspec")}
    if len(names - {None}) < len(ALWAYS):
        pytest.skip("only some of the scenarios were selected")
    found = [results.of(name) for name in ALWAYS]
    known = {line for result in found for line in result["known"]}
    entered = {line for result in found for line in result["entered"]}
    missing = {line for line in known - entered - ONLY_ELSEWHERE.keys() if not any(why in line for why in NOT_HERE)}
    assert not missing, "\n".join(sorted(missing))
    assert not ONLY_ELSEWHERE.keys() - known, f"no such lines any more: {ONLY_ELSEWHERE.keys() - known}"
    assert len(known) > 80
