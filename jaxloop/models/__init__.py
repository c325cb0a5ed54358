"""Tools for training models without writing a step (`fit`, `LossStep`, optimizers), and for exporting models."""

from jaxloop.step.forward import forward as forward
from jaxloop.step.forward import sown_losses as sown_losses
