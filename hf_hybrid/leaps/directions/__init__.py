"""Where a leap goes: one small class per way of predicting weights, each with its paper."""
