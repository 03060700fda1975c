import pytest
import torch

from hf_hybrid.leaps.tail import TailAverage


def tail(parameters, share=0.5):
    names = [f"p{index}" for index in range(len(parameters))]
    return TailAverage(names, parameters, share=share, buffer=lambda p: torch.empty(p.shape))


def walk(average, parameter, values):
    for step, value in enumerate(values, start=1):
        with torch.no_grad():
            parameter.fill_(value)
        if average.wants(step / len(values)):
            average.observe()


def test_the_mean_is_over_the_tail_alone_and_is_kept_where_it_is_better():
    parameter = torch.nn.Parameter(torch.zeros(3))
    average = tail([parameter])
    walk(average, parameter, [100.0, 100.0, 1.0, 3.0])
    told = []
    report = average.conclude(lambda: float((parameter - 2.0).abs().sum()), lambda: told.append(1))
    assert report == {"loss": 3.0, "loss_of_mean": 0.0, "steps": 2, "kept": True}
    assert torch.equal(parameter, torch.full((3,), 2.0)) and len(told) == 1
    assert average.tensors() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_better_come_back_to_the_last_bit(dtype):
    parameter = torch.nn.Parameter(torch.zeros(50, dtype=dtype))
    average = tail([parameter])
    for _ in range(4):
        with torch.no_grad():
            parameter.normal_()
        average.observe()
    own = parameter.detach().clone()
    told = []
    report = average.conclude(lambda: float((parameter.detach() - own).abs().sum()), lambda: told.append(1))
    assert not report["kept"] and torch.equal(parameter, own)
    assert len(told) == 2, "copies of the weights are old after both exchanges"


def test_a_mean_that_is_not_a_number_is_not_kept():
    parameter = torch.nn.Parameter(torch.zeros(2))
    average = tail([parameter])
    walk(average, parameter, [0.0, 0.0, float("nan"), 1.0])
    report = average.conclude(lambda: float(parameter.detach().sum()), lambda: None)
    assert not report["kept"] and torch.equal(parameter, torch.ones(2))


def test_a_run_too_short_to_average_is_left_alone():
    parameter = torch.nn.Parameter(torch.zeros(2))
    average = tail([parameter], share=0.1)
    walk(average, parameter, [1.0, 2.0])
    assert average.conclude(lambda: 0.0, lambda: None) is None


def test_it_goes_on_where_it_was_saved():
    parameter = torch.nn.Parameter(torch.zeros(4))
    first = tail([parameter])
    walk(first, parameter, [0.0, 0.0, 5.0, 7.0])
    second = tail([parameter])
    second.load_state_dict(first.tensors(), first.state_dict())
    assert torch.equal(second.tensors()["p0"], first.tensors()["p0"]) and second.count == 2
