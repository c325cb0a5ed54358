"""A collection of clu metrics for a classifier."""

import flax
import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics


@flax.struct.dataclass
class Scores(clu_metrics.Collection):
    accuracy: clu_metrics.Accuracy
    loss: clu_metrics.Average.from_output("loss")


def scores(logits, labels):
    loss = -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]
    return Scores.single_from_model_output(logits=logits, labels=labels, loss=loss)
