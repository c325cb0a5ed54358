"""The base classes of steps. A step defines how a batch is processed."""

from jaxloop.step.step import NO_OPTIMIZER as NO_OPTIMIZER
from jaxloop.step.step import FusingError as FusingError
from jaxloop.step.step import NumpyStep as NumpyStep
from jaxloop.step.step import Step as Step
from jaxloop.types import Batch as Batch
from jaxloop.types import BatchSpec as BatchSpec
from jaxloop.types import Output as Output
from jaxloop.types import State as State
