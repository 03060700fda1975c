"""
Published ways of predicting weights, as arms of the comparison in `benchmarks/speedup/leaps.md`.

They lose to the default direction there, so they are not part of the package. Each is a subclass of the public
`hf_hybrid.Direction` and goes in as a user's own would:

    HybridTrainer(model, args, train_dataset=data, direction=Drift)
    HybridTrainer(model, args, train_dataset=data, direction=partial(Snoo, momentum=0.9))
    HybridTrainer(model, args, train_dataset=data, direction=partial(NiNo, network=Nowcaster.load("nino_mlp.pt")))

`drift.py` has `Drift` and `Snoo`, which follow the last block of real steps; `extrapolation.py` has `Linear` and
`ReducedRank`, which fit a sequence of states of the weights; `nino.py` has a published network. Their tests run with
`python -m pytest benchmarks/directions`.
"""
