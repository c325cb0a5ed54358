"""Stand-ins for objects of packages that the tests don't need."""


class Tensor:
    """The parts of a torch.Tensor that are needed here. By default it is on an accelerator and has a gradient."""

    __module__ = "torch"

    def __init__(self, array, dtype="torch.float32", place="cuda", has_gradient=True):
        self.array, self.dtype, self.place, self.has_gradient = array, dtype, place, has_gradient

    @property
    def shape(self):
        return self.array.shape

    def detach(self):
        return type(self)(self.array, self.dtype, self.place, False)

    def cpu(self):
        return type(self)(self.array, self.dtype, "cpu", self.has_gradient)

    def float(self):
        return type(self)(self.array, "torch.float32", self.place, self.has_gradient)

    def numpy(self):
        assert (self.place, self.has_gradient) == ("cpu", False) and self.dtype != "torch.bfloat16"
        return self.array
