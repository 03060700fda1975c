"""The tables of README.md and docs/results.md: sentences around numbers of several folders."""

from __future__ import annotations

from benchmarks.speedup.report import table_of
from benchmarks.tables import all_lines, markdown, percent, results, standard_error, table
from benchmarks.tables.gpu import gain, loss_from_scratch
from benchmarks.tables.memory import GIB, accuracy, low_bit, outcomes, peak, stopped, times_resident
from benchmarks.tables.other import change, exported, searched, size
from benchmarks.tables.skips import grpo_run, prompts, recomputed, row_ratio
from benchmarks.tables.speedup import ADAPTERS, SEEDS, default_runs, elsewhere_s, s_of, speedup

OTHERS = ("reward", "kto", "orpo")


def times(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}"


def smollm2_runs(length: int) -> list[float]:
    """Whole GRPO runs on SmolLM2 with prompts of this length: how much longer TRL takes."""
    return sorted(row["ratio"] for row in grpo_run("smollm2", length=length, rewards="binary", iterations=1))


def verified_runs() -> list[float]:
    """Trainings of SmolLM2 with a verifier: how much longer TRL takes."""
    found = results("skips", "arithmetic", "arm", "rate", "seed", "steps")
    pairs = [(row, found.get(**{**row, "arm": "trl"})) for row in found.rows(arm="hybrid")]
    return sorted(
        sum(theirs["seconds"].values()) / sum(ours["seconds"].values()) for ours, theirs in pairs if theirs is not None
    )


def asked(trains: str) -> str:
    """Milliseconds in which a step asks what code of a user has changed."""
    row = results("skips", "questions", "trains").get(trains=trains) or {}
    return f"{row['of_model'] + row['of_trainer']:.2f}"


def arms(task: str) -> dict:
    return table_of(speedup(), task, None, SEEDS)["arms"]


def rule_over_best() -> list[float]:
    """Loss of LoRA at the rule's rate over AdamW's at its best one, seed 0, on SmolLM2."""
    found = [default_runs(task, gpu) for task, _, gpu in ADAPTERS if gpu]
    return sorted(rule[0]["eval_loss"] / best - 1 for rule, (best, _) in found)


def worst_plan(gpu: bool) -> float:
    return max(abs(row["error"]) for row in accuracy(gpu))


def scratched(arm: str) -> str:
    return " and ".join(f"{loss_from_scratch(shape, arm):.2f}" for shape in ("10m", "124m"))


def images_times() -> dict[str, float]:
    """How many times fewer seconds ours takes than TRL, by the case."""
    return {row["case"]: row["ratio"] for row in all_lines("skips", "images")}


@table("readme")
def readme() -> str:
    images = images_times()
    system = row_ratio("smollm2", "shuffled", "system", "trainer")
    instructions = row_ratio("smollm2", "shuffled", "instructions", "trainer")
    chats = row_ratio("smollm2", "shuffled", "system", "trl")
    grpo = smollm2_runs(64)
    streamed, resident = (peak("8b", mode, 16384) for mode in ("stream-8bit", "resident-8bit"))
    code = arms("code")["hybrid"]
    s = elsewhere_s()
    small, large = ({kind: gain("sft", shape, kind) for kind in ("instructions", "system")} for shape in ("1b", "8b"))
    rows = [
        [
            "Llama shapes of 1B and 8B, LoRA, 16 rows a step, one H100",
            "[SFT](docs/results.md#on-a-gpu)",
            "a step beside the fastest peer (padding-free, with or without Liger's kernels): "
            f"{times(small['instructions'])} times as fast at 1B and {times(large['instructions'])} at 8B on "
            f"instructions, {times(small['system'])} and {times(large['system'])} with a common system prompt, "
            f"{times(gain('sft', '1b', 'agent'))} at 1B on agent trajectories, where 8B does not fit without sharing; "
            "the update is the same. Our steps and most peers' ran with Liger's norms, rotary embedding and MLP, "
            "left by an arm before",
        ],
        [
            "SmolLM2-135M, LoRA, 8 rows a step, one CPU thread",
            "[SFT](docs/sft.md)",
            f"{times(instructions)} (instructions) to {times(system)} times (a common system prompt) fewer CPU "
            f"seconds than `Trainer`, {times(chats)} than TRL; the update is the same",
        ],
        [
            "SmolLM2-135M, all weights, 4 pairs",
            "[DPO](docs/dpo.md)",
            f"{times(prompts('pairs')['ratio'])} times fewer CPU seconds than TRL at prompt : completion = 2 : 1, "
            f"{times(prompts('pairs of different lengths')['ratio'])} where TRL pads; the update is the same",
        ],
        [
            "a Qwen2-VL of 96M random weights, 4 questions an image",
            "[SFT with images](docs/sft.md#images)",
            f"{times(images['sft'])} times fewer CPU seconds than TRL, {times(images['dpo'])} for pairs, "
            f"{times(images['grpo'])} for GRPO's update; the update is the same",
        ],
        [
            "SmolLM2-135M, LoRA, 2 x 8 completions, half of the rows without advantage",
            "[GRPO](docs/grpo.md)",
            f"{times(grpo[0])} to {times(grpo[-1])} times fewer CPU seconds than TRL for whole runs, "
            f"{' and '.join(map(times, verified_runs()))} with 8 x 8 short answers to prompts with worked examples; "
            "completions and update are the same",
        ],
        [
            "8B Llama shapes, 16,384 tokens a step, one H100",
            "[a model that does not fit](docs/memory.md)",
            f"{streamed['device_used'] / GIB:.1f} instead of {resident['device_used'] / GIB:.1f} GiB on the device, "
            f"at {times(times_resident(streamed))} times the time; the update is exact",
        ],
        [
            "Llamas of 0.3M and 1.1M weights, 400 and 600 steps",
            "[training from scratch](docs/from_scratch.md)",
            f"AdamW needs {min(s):.1f} to {max(s):.1f} and {code['S']:.1f} times the backward passes for the same "
            f"held-out loss; 10M and 124M weights reach {scratched('hybrid')} in 400 steps with leaps, and "
            f"{scratched('adamw')} with AdamW; this changes the training",
        ],
    ]
    return markdown(["measured on", "use", "what it saves"], rows)


@table("results")
def results_() -> str:
    code = arms("code")["hybrid"]
    sft = {
        (kind, arm): row_ratio("smollm2", "shuffled", kind, arm)
        for kind in ("system", "instructions")
        for arm in ("trainer", "trl")
    }
    others = results("skips", "others", "trainer")
    of_agents = {
        (model, order): row_ratio(model, order, "agent", "trainer")
        for model in ("mixture", "states")
        for order in ("kept", "shuffled")
    }
    grpo, short = smollm2_runs(64), smollm2_runs(20)
    turns = sorted(row["share_of_seconds"] for row in results("skips", "turns", "model", "completions").rows())
    lowest, highest = rule_over_best()[0], rule_over_best()[-1]
    streamed, resident = (peak("8b", mode, 16384) for mode in ("stream-8bit", "resident-8bit"))
    own = {row["arm"]: row for row in all_lines("speedup", "overhead")}
    images = images_times()
    small, int8, sweeps = exported("reordered", "gguf-q4_m"), exported("smollm2", "int8"), searched()
    s = elsewhere_s()
    saves = [stopped(size, "off, behind")[1] for size in ("135M", "27M")]
    rows = [
        [
            "[SFT](sft.md)",
            "`rows/`, `trl/`",
            "every token of a step once: no padding, shared beginnings once",
            f"{times(sft['instructions', 'trainer'], 2)} (instructions) and {times(sft['system', 'trainer'], 2)} times "
            f"(a common system prompt) fewer CPU seconds than `Trainer`, {times(sft['instructions', 'trl'], 2)} and "
            f"{times(sft['system', 'trl'], 2)} than TRL; rows of equal length: none",
            "4 ms a window; two forward passes at the start",
            "SmolLM2-135M, LoRA, 3 steps each, one CPU thread; equality: 22 architectures",
        ],
        [
            "[DPO](dpo.md)",
            "`rows/`, `trl/`",
            "a prompt once for both completions",
            f"{times(prompts('pairs')['ratio'], 2)} times fewer CPU seconds than TRL at 2 : 1, "
            f"{times(prompts('pairs of different lengths')['ratio'], 2)} where TRL pads",
            "as SFT",
            "SmolLM2-135M, all weights, 3 pairs of updates, one CPU thread",
        ],
        [
            "[reward models, KTO, ORPO](exact_skips.md#other-losses)",
            "`rows/`",
            "with the mixin, the backbone computes every token once",
            f"{', '.join(times(others.get(trainer=name)['ratio'], 2) for name in OTHERS)} "
            "times fewer CPU seconds than TRL; the head scores padding as before",
            "two forward passes at the start",
            "SmolLM2-135M, all weights, 3 steps each, one CPU thread",
        ],
        [
            "[images](sft.md#images)",
            "`rows/`, `trl/`",
            "an image once in a window, and what follows it as text",
            f"{times(images['sft'], 2)} (4 questions an image), {times(images['dpo'], 2)} (a pair), "
            f"{times(images['grpo'], 2)} (GRPO's update, 8 completions), {times(images['grpo small'], 2)} (in 4 "
            f"micro-batches) and {times(images['prefill'], 2)} times (their prefill) fewer CPU seconds "
            f"than TRL; images that no rows share: {times(images['sft apart'], 2)}",
            "as SFT; the pixels of a batch are hashed on the host",
            "a Qwen2-VL of 96M random weights, 256 tokens an image, medians of three rounds of a step, one "
            "busy CPU thread",
        ],
        [
            "[mixtures, layers with a state](exact_skips.md#mixtures-of-experts)",
            "`rows/`",
            "every token of a step once, with the router's loss",
            f"{times(of_agents['mixture', 'kept'], 2)} and "
            f"{times(of_agents['states', 'kept'], 2)} times fewer CPU seconds than `Trainer` on "
            f"agents' rows together, {times(of_agents['mixture', 'shuffled'], 2)} and "
            f"{times(of_agents['states', 'shuffled'], 2)} shuffled",
            "in layers with a state, prefixes that save fewer than 64 tokens are computed again for each row",
            "Qwen3-MoE and Qwen3.5 with a fifth of SmolLM2's layers, LoRA, 3 steps each, one busy CPU thread",
        ],
        [
            "[GRPO](grpo.md)",
            "`trl/`, `rows/`",
            "prompts once, ended rows leave, rows without advantage are left out",
            f"{times(grpo[0], 2)} to {times(grpo[-1], 2)} times fewer CPU seconds than TRL for a whole run "
            f"(prompts of 64 tokens), {times(short[0], 2)} with 20 tokens; {' and '.join(map(times, verified_runs()))} "
            "with 8 x 8 short answers to prompts with worked examples; generation with tools takes "
            f"{turns[0]:.2f} to {turns[-1]:.2f} of TRL's",
            "none measured",
            "SmolLM2-135M, LoRA, 2 x 8 completions, half of the rows without advantage, 3 rounds; the last two with a "
            "verifier, two seeds; one CPU thread",
        ],
        [
            "[LoRA](peft_and_trl.md)",
            "`run/`",
            "a rate that follows from the adapters' shape if you set none; no leaps",
            f"ends {percent(lowest)} to {percent(highest)} from AdamW at its best rate, without a search",
            "none",
            "SmolLM2-135M, 200 steps, four shapes and texts, seed 0 against a sweep, H100",
        ],
        [
            "[full fine-tuning](../benchmarks/speedup/pretrained.md)",
            "`phase_memory/`, `plan/`",
            "plain `Trainer`'s update; no leaps; `activation_checkpointing=\"auto\"` is an option",
            f"recomputing nothing where all fits: TRL's default takes {times(recomputed('all weights', 'auto')[1], 2)} "
            f"times as long ({times(recomputed('adapters', 'auto')[1], 2)} with LoRA)",
            f"{100 * own['pretrained']['share']:.2f} % of a run",
            "SmolLM2-135M, three seeds for the losses, 3 steps for seconds, one CPU thread",
        ],
        [
            "[from scratch](from_scratch.md)",
            "`leaps/`, `optimizers.py`",
            "leaps under AdamW",
            f"S {s_of(code)} after 600 steps (all costs {code['S_all_costs']:.2f}); on a task without tuning "
            f"{' / '.join(f'{value:.2f}' for value in s)}; `fast` has {s_of(arms('code')['fast'])}",
            f"{100 * own['hybrid']['share']:.0f} % of a run at this size; a copy and an average of the weights",
            "Llamas of 1.1M and 0.3M weights, three seeds, baseline at its best rate, one CPU thread",
        ],
        [
            "[does not fit](memory.md)",
            "`streaming/`, `plan/`",
            '`memory="auto"` streams layers, and recomputes those whose graphs do not fit; the plan says what fits',
            f"{streamed['device_used'] / GIB:.1f} instead of {resident['device_used'] / GIB:.1f} GiB; plans within "
            f"{100 * worst_plan(False):.2f} % (tracker) and {100 * worst_plan(True):.2f} % (H100) for resident models; "
            f"all graphs kept: {times(recomputed('adapters', 'streamed 30', 'streamed 0')[1], 2)} (LoRA) and "
            f"{times(recomputed('all weights', 'streamed 30', 'streamed 0')[1], 2)} times fewer CPU seconds",
            f"{times(times_resident(streamed), 2)} times the time (goal: 1.15); streamed plans were too small",
            f"8B shapes on one H100, one run; equal to the last bit on {outcomes()['equal']} of "
            f"{sum(outcomes().values())} architectures (tiny, CPU)",
        ],
        [
            "[8-bit states](mixed_precision.md)",
            "`streaming/`",
            'off; `optimizer_states="8bit"`',
            f"{low_bit()['bf16-8bit-stochastic']['bytes_per_weight']:.2f} instead of "
            f"{low_bit()['adamw']['bytes_per_weight']:.1f} bytes per weight",
            f"loss {percent(low_bit()['bf16-8bit-stochastic']['excess'], 2)} +- "
            f"{100 * standard_error(low_bit()['bf16-8bit-stochastic']['excess_by_seed']):.2f}",
            "1.1M weights, 300 steps, three seeds, CPU",
        ],
        [
            "[small export](export.md)",
            "`export/`",
            "int8, nf4, GGUF; the loss before and after is measured and printed",
            f"{size(small['exported']['disk_bytes'])} (`gguf-q4_m`) and "
            f"{size(int8['exported']['disk_bytes'])} (`int8`) in place of {size(int8['original']['disk_bytes'])}",
            f"loss {change(small)} and {change(int8)}",
            "SmolLM2-135M, 2,040 tokens, one seed, CPU; llama.cpp read the files",
        ],
        [
            "[restart](resume.md)",
            "`saving/`",
            "the same command goes on; saves are written behind the step",
            f"a save stops training {saves[0]:.2f} (135M) and {saves[1]:.2f} times (27M) as long as plain `Trainer`'s",
            "a copy of weights and states on the host; the steps beside a save are slower on one core",
            "1,032 killed trainings ended at the same bits (tiny, 1 and 2 processes, CPU)",
        ],
        [
            "[restart of GRPO](grpo.md#resume)",
            "`trl/`",
            "the generation batch under way is in the checkpoint",
            "143 kills of 114 trainings, all at the same bits",
            "420 of 1,542 calls of rewards and tools came twice",
            "tiny, 19 kinds, CPU",
        ],
        [
            "[your own code](exact_skips.md#your-own-code)",
            "`run/`, `rows/`",
            "what a subclass, patch, callback, collator or hook changes is what is computed",
            "the training of `Trainer` or TRL, or a refusal that says why, in 697 crossings of place, change, trainer "
            "and weights, and in 991 of [code and streamed layers](streamed_code.md)",
            f"{asked('all weights')} ms a step in the shape of SmolLM2-135M, {asked('adapters')} ms with LoRA; where "
            "it acts on micro-batches, these stay apart",
            "tiny models, 3 steps each (`tests/run/test_crossings.py`, `tests/streaming/test_users_code.py`), CPU; "
            "milliseconds on one thread",
        ],
        [
            "[sweep of rates](sweeps.md)",
            "`cli/`, `forecast/`",
            "trials that cannot win are ended",
            f"{min(found['steps_percent'] for found in sweeps):.0f} to "
            f"{max(found['steps_percent'] for found in sweeps):.0f} % of the grid's steps",
            f"the loss is at most {max(found['worse_percent'] for found in sweeps):.1f} % above the grid's lowest",
            "four tasks, two seeds, replayed on recorded curves",
        ],
    ]  # fmt: skip
    heading = ["use", "rooms", "by default", "gain", "cost", "evidence"]
    return markdown(heading, rows)
