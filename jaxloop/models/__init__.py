"""`fit`, `LossStep`, optimizers and other tools for training models without writing a step, and model export."""

from jaxloop.step.forward import forward as forward
from jaxloop.step.forward import sown_losses as sown_losses
