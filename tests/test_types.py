import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxloop import Step, types

pytestmark = pytest.mark.usefixtures("compile_fast")


class WithCollections(nn.Module):
    """A model with parameters, batch statistics and a custom collection."""

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(2)(x))
        seen = self.variable("counters", "seen", lambda: jnp.zeros((), jnp.int32))
        if train and not self.is_initializing():
            seen.value += x.shape[0]
        return x


def test_create_requires_only_the_arguments_of_flax():
    state = types.TrainState.create(apply_fn=lambda x: x, params={"w": jnp.ones(2)}, tx=optax.adam(1e-3))
    assert state.step.dtype == jnp.int32 and state.step.shape == ()
    assert state.variables == {"params": state.params}


@pytest.mark.parametrize(
    "params",
    [eqx.nn.Linear(3, 1, key=jax.random.key(0)), [jnp.ones([3, 1]), jnp.zeros(1)], jnp.ones([3, 1])],
    ids=["equinox", "list", "array"],
)
def test_parameters_can_be_any_pytree_of_arrays(params):
    state = types.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.5))
    grads = jax.tree.map(jnp.ones_like, params)
    new_state = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))(state, grads)
    assert int(new_state.step) == 1
    jax.tree.map(lambda old, new: np.testing.assert_allclose(new, old - 0.5), params, new_state.params)


def test_parameters_that_are_not_arrays_raise_with_a_suggested_fix():
    module = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"got .* at params.activation.*eqx.partition\(module, eqx.is_inexact_array"):
        types.TrainState.create(apply_fn=None, params=module, tx=optax.sgd(0.1))
    params, static = eqx.partition(module, eqx.is_inexact_array)
    apply_fn = lambda params: eqx.combine(params, static)
    state = types.TrainState.create(apply_fn=apply_fn, params=params, tx=optax.sgd(0.1))
    assert state.apply_fn(state.params)(jnp.ones(3)).shape == (1,)


def test_update_variables_updates_every_collection():
    state = Step(jax.random.key(0), WithCollections()).initialize_model([1, 3])
    _, updates = state.apply_fn(state.variables, jnp.ones([5, 3]), mutable=["batch_stats", "counters"])
    state = state.update_variables(updates)
    assert int(state.collections["counters"]["seen"]) == 5
    assert not np.allclose(state.batch_stats["BatchNorm_0"]["mean"], 0)
    assert set(state.variables) == {"params", "batch_stats", "counters"}
    with pytest.raises(ValueError, match="apply_gradients"):
        state.update_variables({"params": {}})


def test_values_that_flax_would_replace_by_their_gradients_are_an_error():
    params = {"params": {"kernel": jnp.ones(3)}, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    with pytest.raises(ValueError, match="Use Flax's own TrainState"):
        types.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
