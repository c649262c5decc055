"""The errors that keras_distplug raises.

    DistplugError
    ├── ConfigurationError (a ValueError)   invalid argument or environment; before training
    │   ├── ClusterError                    the environment describes no valid cluster
    │   ├── VersionError                    a package is missing, too old or incompatible
    │   ├── InUseError                      another process is training in the folder
    │   ├── ModelError                      the model cannot be placed under the strategy
    │   └── DataError                       the data cannot be read or split as requested
    ├── CheckpointError
    │   ├── CorruptCheckpointError          the bytes on disk are not those that were committed
    │   ├── OtherRunError                   the directory holds a run of another model
    │   ├── NoCheckpointError               the run or checkpoint does not exist
    │   ├── FencedError                     another process has taken over the folder
    │   └── SaveError                       a checkpoint could not be committed
    ├── AgreementError                      a worker did not answer in time
    ├── PeerLostError                       another worker is gone, so training cannot continue
    ├── MetadataError                       a cloud's metadata server gave no valid answer
    ├── NonFiniteError                      training cannot continue because of NaN or Inf
    ├── Preempted                           training was preempted, after saving a checkpoint
    └── SupervisorError                     the supervisor could not stop the workers

Every message says what was expected, what was received and what to do next.
"""

from __future__ import annotations

from keras_distplug.core.printable import printable


class DistplugError(Exception):
    """Base class of all keras_distplug errors."""

    def __str__(self) -> str:
        # Messages may quote files from untrusted folders.
        return printable(super().__str__())


class ConfigurationError(DistplugError, ValueError):
    """An argument or the environment is invalid. Raised before training starts."""


class ClusterError(ConfigurationError):
    """`TF_CONFIG` or the scheduler's variables describe no valid cluster."""


class VersionError(ConfigurationError):
    """A package is missing, too old, or lacks a private name that this release needs."""


class InUseError(ConfigurationError):
    """Another process is training in the folder."""


class ModelError(ConfigurationError):
    """The model cannot be placed under the chosen strategy."""


class DataError(ConfigurationError):
    """The data cannot be read or split as requested."""


class CheckpointError(DistplugError):
    """Base class of errors about checkpoints."""


class CorruptCheckpointError(CheckpointError):
    """The bytes on disk are not those that were committed."""


class OtherRunError(CheckpointError):
    """The directory holds a run of another model."""


class NoCheckpointError(CheckpointError):
    """The run or the checkpoint does not exist."""


class FencedError(CheckpointError):
    """Another process has taken over the folder, so this one cannot save any more.

    A process that this error terminates exits with code 93, "do not restart".
    """


class SaveError(CheckpointError):
    """A checkpoint could not be committed. Earlier checkpoints are unaffected."""


class AgreementError(DistplugError):
    """A worker did not answer in time."""


class PeerLostError(DistplugError):
    """Another worker is gone, so training cannot continue. Restart all workers.

    A process that this error terminates exits with code 201, once its `atexit` functions have
    finished, or after 30 seconds. If the script catches the error, it chooses its own exit code,
    provided TensorFlow shuts down within 30 seconds; otherwise SIGALRM ends the process, which a
    shell reports as 142.
    """


class MetadataError(DistplugError):
    """The metadata server of a cloud did not answer, or its answer is not valid for that cloud."""


class NonFiniteError(DistplugError):
    """Training cannot continue: too many consecutive updates were not finite."""


class Preempted(DistplugError):
    """Training was preempted. When restarted, it resumes from its newest checkpoint."""


class SupervisorError(DistplugError):
    """The supervisor could not stop its group of workers."""
