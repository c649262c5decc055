"""Every error that keras_distplug raises on purpose.

    DistplugError
    ├── ConfigurationError (a ValueError)   argument or environment; always before training
    │   ├── ClusterError                    the environment describes no valid cluster
    │   ├── VersionError                    a package is missing, too old, or has changed
    │   ├── InUseError                      another process is training in the folder
    │   ├── ModelError                      the model cannot be placed under the strategy
    │   └── DataError                       the data cannot be read or split as asked
    ├── CheckpointError
    │   ├── CorruptCheckpointError          bytes on disk are not those that were committed
    │   ├── OtherRunError                   the directory holds the run of another model
    │   ├── NoCheckpointError               there is no such run, or no such checkpoint
    │   ├── FencedError                     another process has taken the folder over
    │   └── SaveError                       a checkpoint could not be committed
    ├── AgreementError                      a worker did not answer in time
    ├── PeerLostError                       another worker is gone, and training with it
    ├── MetadataError                       a cloud's metadata server did not answer properly
    ├── NonFiniteError                      training does not get on for NaN or Inf
    ├── Preempted                           training was told to go, and has saved
    └── SupervisorError                     the workers could not be brought to their end

Each message says what was received, what was expected and what to do next.
"""

from __future__ import annotations

from keras_distplug.core.printable import printable


class DistplugError(Exception):
    """Base of all errors of keras_distplug."""

    def __str__(self) -> str:
        # The message may quote a file from an untrusted folder.
        return printable(super().__str__())


class ConfigurationError(DistplugError, ValueError):
    """An argument or the environment is not usable. Raised before any training."""


class ClusterError(ConfigurationError):
    """`TF_CONFIG` or the scheduler's variables describe no valid cluster."""


class VersionError(ConfigurationError):
    """A package is missing or too old, or lacks a private name that this release needs."""


class InUseError(ConfigurationError):
    """Another process is training in the folder."""


class ModelError(ConfigurationError):
    """The model cannot be placed under the chosen strategy."""


class DataError(ConfigurationError):
    """The data cannot be read or split as asked."""


class CheckpointError(DistplugError):
    """Base of the errors about checkpoints."""


class CorruptCheckpointError(CheckpointError):
    """The bytes that were read are not the bytes that were committed."""


class OtherRunError(CheckpointError):
    """The directory holds the run of another model."""


class NoCheckpointError(CheckpointError):
    """There is no such run, or no such checkpoint."""


class FencedError(CheckpointError):
    """Another process has taken the folder over: this one saves nothing more.

    A process that ends with this error exits with code 93, which means "do not restart".
    """


class SaveError(CheckpointError):
    """A checkpoint could not be committed. What was committed before is untouched."""


class AgreementError(DistplugError):
    """A worker did not answer in time."""


class PeerLostError(DistplugError):
    """Another worker is gone, and training with it. All workers have to be started again.

    A process that ends with this error has the code 201, after its `atexit` functions, for which
    there are 30 seconds. One that catches it ends with a code of its own, if TensorFlow comes to
    its end in 30 seconds, and otherwise by SIGALRM, which is 142 to a shell.
    """


class MetadataError(DistplugError):
    """The metadata server of a cloud did not answer, or not as that cloud's does."""


class NonFiniteError(DistplugError):
    """Training does not get on: one update after another is not finite."""


class Preempted(DistplugError):
    """Training was told to go. Started again, it goes on from its newest checkpoint."""


class SupervisorError(DistplugError):
    """The group of workers could not be brought to its end."""
