"""
What several tests share, beside the fixtures and the tiny trainings of `tests/conftest.py`. Benchmarks use it too.

Tests import it as `rig`: pytest puts `tests/` on the path when it loads `conftest.py`.

| file | what it gives |
|---|---|
| `adapter_changes.py` | what a callback may change about adapters |
| `bit_flips.py` | bits that change in memory, behind torch's back |
| `byte_llama.py` | a tokenizer of bytes, a tiny Llama that fits to it, and messages |
| `chats.py` | chats and pairs of Python's help, and SFT and DPO of them |
| `circles.py` | which files of the package import each other |
| `completions.py` | tiny models that complete prompts, and `generate` beside this package |
| `deepspeed_on_cpu.py` | accelerate's way to DeepSpeed for processes on the CPU |
| `fails_backward.py` | a kernel that works forward and fails backward |
| `fake_device.py` | a device with a limit of bytes, or of sequences, that raises what a GPU's allocator raises |
| `fresh_process.py` | a process that imports every module, trains, and looks what that did |
| `fsdp2_on_cpu.py` | accelerate's way to FSDP2 for processes on the CPU |
| `graphs.py` | graphs of recorded operations, in place of CUDA's |
| `head_of_trl_1_15.py` | a head for TRL 1.15, whose own needs a GPU |
| `hub_server.py` | a Hub on this machine |
| `launched.py` | the runs that two processes make under DDP |
| `live_bytes.py` | how many bytes of tensors are alive, and their peak, without an allocator that counts |
| `llama_cpp.mjs` | a GGUF file in llama.cpp: its loss and its token ids |
| `own_generators.py` | a module of a user, with random generators of its own |
| `pages.py` | a page of HTML taken apart |
| `pairs.py` | pairs of words, tiny models of many kinds, and DPO of them |
| `processes.py` | forked processes that train together, and one that imports everything anew |
| `rollouts.py` | tiny GRPO and RLOO trainings, in which a share of the rows has no advantage |
| `run_folders.py` | output folders as runs leave them, with known numbers |
| `sft_rows.py` | rows of the kinds that people fine-tune on |
| `stand_in_training.py` | a process in the place of `hf-hybrid train`, for sweeps |
| `strict.py` | fall-backs after unforeseen exceptions, as errors |
| `tiny_architectures.py` | a tiny model of every causal language model architecture |
| `traces.py` | traced steps that are remembered, within a process or between several |
| `trainers.py` | a trainer of the tiny model, made and trained |
| `user_code.py` | what people change around a trainer: batches, losses, steps, models |
| `varlen.py` | twins of the attention that takes all segments in one call |
| `vision.py` | tiny models that see pictures, their processors, and rows with pictures |
| `vllm_stand_in.py` | the names that TRL takes from vLLM, answered by a transformers model |
| `with_eyes.py` | tiny models of images and text |

A process of its own starts from the path of its file and gets nothing from pytest.
"""
