"""
A CUDA device that is not there, and what the package does on it.

- `device.py` is the simulator: real `cuda:0` tensors in a CPU-only torch, over a few hooks in C++ (`guard.cpp`).
- `scenarios.py` has the trainings; `runner.py` runs each in a process of its own, on the device and on the CPU.
- `test_scenarios.py` holds both against each other; `test_device.py` shows that the simulator finds planted errors.
"""
