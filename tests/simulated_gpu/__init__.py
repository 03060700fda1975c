"""
A CUDA device that is not there, and what the package does on it.

- `device.py` is the simulator: real `cuda:0` tensors in a CPU-only torch, over a few hooks in C++ (`guard.cpp`).
- `scenarios.py` has the trainings; `runner.py` runs each in a process of its own, on the device and on the CPU.
- `test_scenarios.py` starts it (`results.py`) and holds both against each other.
- `test_device.py` shows that the simulator finds planted errors.
- `test_on_a_gpu.py` runs the scenarios on a real GPU (`real.py`), by `pytest -m gpu`.
- `test_commands.py` runs that command and the benchmarks for a GPU on the simulated one (`run_module.py`).
"""
