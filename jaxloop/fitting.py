"""Training in one call, and the learning rates for it."""

import optax

from jaxloop import checks


def lr_schedule(base_lr: float, steps_per_epoch: int, epochs: int = 100, warmup_epochs: int = 5) -> optax.Schedule:
    r"""The learning rate by step: a linear warm-up to `base_lr`, then a cosine down to a hundredth of it.

    With `w = warmup_epochs * steps_per_epoch` and `T = epochs * steps_per_epoch`, at step `t`

    - for `t < w`: `base_lr * (0.1 + 0.9 t / w)`;
    - for `w <= t <= T`: `base_lr * (0.01 + 0.99 (1 + cos(pi (t - w) / (T - w))) / 2)`;
    - after `T`: `base_lr / 100`.

    The cosine is that of Loshchilov and Hutter, https://arxiv.org/abs/1608.03983; the warm-up that of Goyal et al.,
    https://arxiv.org/abs/1706.02677.

    Args:
      base_lr: the peak, which is reached when the warm-up ends.
      steps_per_epoch: optimizer updates in an epoch.
      epochs: how many epochs the training has.
      warmup_epochs: how many of them warm up; 0 for none.

    Returns:
      An Optax schedule, which takes the place of a learning rate: `optax.adam(lr_schedule(1e-3, 100))`.

    >>> schedule = lr_schedule(1.0, steps_per_epoch=10, epochs=10, warmup_epochs=5)
    >>> [round(float(schedule(step)), 3) for step in (0, 25, 50, 75, 100, 200)]
    [0.1, 0.55, 1.0, 0.505, 0.01, 0.01]
    """
    if not base_lr > 0:
        raise ValueError(f"base_lr must be positive, got {base_lr!r}.")
    checks.check_positive("steps_per_epoch", steps_per_epoch)
    checks.check_positive("epochs", epochs)
    if warmup_epochs != 0:
        checks.check_positive("warmup_epochs", warmup_epochs)
    if warmup_epochs >= epochs:
        raise ValueError(
            f"warmup_epochs must be smaller than epochs, got warmup_epochs={warmup_epochs} and epochs={epochs}. "
            "Lower it; 0 is for no warm-up."
        )
    warmup_steps, total_steps = warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
    cosine = optax.cosine_decay_schedule(base_lr, total_steps - warmup_steps, alpha=0.01)
    if not warmup_steps:
        return cosine
    warmup = optax.linear_schedule(base_lr / 10, base_lr, warmup_steps)
    return optax.join_schedules([warmup, cosine], [warmup_steps])
