"""Datasets and batch iterators that keep track of their position, and functions that create them."""

from jaxloop.data.batching import batched as batched
from jaxloop.data.datasets import Passes as Passes
from jaxloop.data.datasets import batches as batches
from jaxloop.data.datasets import from_index as from_index
from jaxloop.data.datasets import is_one_pass as is_one_pass
from jaxloop.data.datasets import peek as peek
from jaxloop.data.datasets import prefetch as prefetch
from jaxloop.data.datasets import shard_for_process as shard_for_process
from jaxloop.data.position import DatasetPosition as DatasetPosition
from jaxloop.data.position import PositionedIterator as PositionedIterator
from jaxloop.data.position import PositionUnknownError as PositionUnknownError
from jaxloop.data.position import skippable as skippable
from jaxloop.data.sources import IndexedBatches as IndexedBatches
from jaxloop.data.sources import is_endless as is_endless
from jaxloop.data.sources import num_batches as num_batches
from jaxloop.data.tensors import numpy_batch as numpy_batch
