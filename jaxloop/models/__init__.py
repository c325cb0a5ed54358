"""Tools for training a model without writing a step: `fit`, `LossStep`, optimizers and export."""

from jaxloop.step.forward import forward as forward
from jaxloop.step.forward import sown_losses as sown_losses
