import jax
import numpy as np
import optax
import pytest

from jaxloop.fitting import lr_schedule


def test_the_learning_rate_warms_up_and_goes_down():
    schedule = lr_schedule(0.2, steps_per_epoch=10, epochs=8, warmup_epochs=2)
    rates = np.array([schedule(step) for step in range(100)])
    np.testing.assert_allclose(rates[[0, 10, 20]], [0.02, 0.11, 0.2], rtol=1e-5)
    np.testing.assert_allclose(rates[[50, 80, 99]], [0.101, 0.002, 0.002], rtol=1e-5)
    assert np.argmax(rates) == 20
    assert (np.diff(rates[:21]) > 0).all() and (np.diff(rates[20:81]) < 0).all()


def test_the_defaults_are_a_hundred_epochs_of_which_five_warm_up():
    schedule = lr_schedule(1.0, 2)
    np.testing.assert_allclose([schedule(step) for step in (0, 10, 200)], [0.1, 1.0, 0.01], rtol=1e-5)


def test_without_a_warm_up_it_begins_at_the_peak():
    schedule = lr_schedule(0.5, 10, epochs=2, warmup_epochs=0)
    np.testing.assert_allclose([schedule(0), schedule(20)], [0.5, 0.005], rtol=1e-5)


def test_an_optimizer_takes_it():
    optimizer = optax.sgd(lr_schedule(1.0, 10, epochs=2, warmup_epochs=1))
    with jax.numpy_dtype_promotion("standard"):  # Optax's.
        updates, _ = optimizer.update(np.float32(1), optimizer.init(np.float32(0)))
    np.testing.assert_allclose(updates, -0.1, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.0, 10), ValueError, "base_lr must be positive, got 0.0"),
        ((-1, 10), ValueError, "base_lr must be positive, got -1"),
        ((float("nan"), 10), ValueError, "base_lr must be positive, got nan"),
        ((0.1, 0), ValueError, "steps_per_epoch must be a positive int, got 0"),
        ((0.1, 10.5), TypeError, "steps_per_epoch must be a positive int, got 10.5"),
        ((0.1, 10, 0), ValueError, "epochs must be a positive int, got 0"),
        ((0.1, 10, 5, -1), ValueError, "warmup_epochs must be a positive int, got -1"),
        ((0.1, 10, 5), ValueError, "smaller than epochs, got warmup_epochs=5 and epochs=5. Lower it; 0 is for no"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        lr_schedule(*arguments)
