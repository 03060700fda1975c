"""stub until research"""


class LearningRateRescue:
    def __init__(self, *, max_scale, max_steps):
        self.scale = 1.0

    def observe_step(self, step, loss, norm):
        pass

    def observe_leap(self, wants_more):
        pass

    def back_off(self):
        pass

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, s):
        self.scale = s["scale"]
