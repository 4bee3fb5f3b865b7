"""Checkpoints with orbax: the training state and the settings that fix the run."""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """Checkpoints of one run, each in a folder named by its number of finished steps.

    Args:
      folder: where they lie.
      fixed: settings (JSON values) without which a resumed run would not be the same run, such as
        the seed and the data.
      resume: whether the run continues from the newest one.

    Raises:
      ValueError: if there is nothing to resume, if the checkpoint cannot be read or belongs to a
        run with other settings, or if a new run would mix its checkpoints with those of another.
    """

    def __init__(self, folder: Path, fixed: dict, *, resume: bool):
        self._folder, self._fixed = folder, fixed
        if not resume and folder.exists() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} holds the checkpoints of another run; continue it with --resume or "
                "choose another --out"
            )
        if resume and not folder.exists():
            raise ValueError(f"--resume found no checkpoint in {folder}")
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        if not resume:
            return
        if self._manager.latest_step() is None:
            raise ValueError(f"--resume found no checkpoint in {folder}")
        saved = self._read(fixed=ocp.args.JsonRestore()).fixed
        for name, value in fixed.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"--resume: the checkpoint in {folder} was made with {name} = "
                    f"{saved.get(name)!r}, this run has {value!r}; they must be equal"
                )

    def save(self, step: int, state) -> None:
        """Writes in the background; the arrays of `state` may be donated after this returns."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), fixed=ocp.args.JsonSave(self._fixed)
            ),
        )

    def restore(self, like):
        """The newest state, with the structure, dtypes and shardings of `like`.

        Raises:
          ValueError: if it cannot be read.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._read(state=ocp.args.StandardRestore(abstract)).state

    def _read(self, **items):
        step = self._manager.latest_step()
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax raises plain Exception for some damage
            reason = str(error).splitlines()[0][:200]
            raise ValueError(
                f"--resume cannot read the checkpoint {self._folder / str(step)} ({reason}); "
                "delete it to continue from the one before it, if there is one"
            ) from error

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
