"""Describes a tf.data pipeline, and finds the parts that a resumed run cannot reproduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from keras_distplug.backend.tensorflow.input import pipeline
from keras_distplug.backend.tensorflow.input.pipeline_steps import FROM_GENERATOR, Step

# Arguments that affect which samples come, or in which order.
_RELEVANT = (
    "block_length",
    "buffer_size",
    "count",
    "cycle_length",
    "drop_remainder",
    "index",
    "num_shards",
    "shift",
    "size",
    "start",
    "step",
    "stop",
    "stride",
)
# Steps that affect neither.
_IRRELEVANT = ("prefetch", "options", "model", "tensor")


def audit(parts: pipeline.Pipeline, *, is_resumed_mid_pass: bool = True) -> list[str]:
    """Lists the parts of a pipeline that a resumed run cannot reproduce, and what to change.

    Example:

    ```python
    audit(pipeline.read(tf.data.Dataset.range(9).map(lambda i: tf.random.uniform([]))))
    # ["map (train.py, line 3): RandomUniform has no seed. Set one ..."]
    ```

    Args:
        parts: The pipeline.
        is_resumed_mid_pass: False if every pass reads the pipeline from its start.

    Returns:
        One line per finding. Shuffles without a seed are not included: training gives them seeds,
        unless a function of another transformation creates them.
    """
    lines = [] if parts.options.deterministic is not False else [_DISORDERED_OPTIONS]
    return lines + [
        f"{_named(step)}: {line}"
        for step in parts.steps
        for line in _step_lines(step, is_resumed_mid_pass)
    ]


def _named(step: Step) -> str:
    return step.title if step.where is None else f"{step.title} {step.where}"


_DISORDERED_OPTIONS = (
    "options.deterministic=False lets parallel transformations change the order of their elements. "
    "Remove it"
)
_STATELESS = (
    "zip the data with `tf.data.Dataset.random(seed)` and use `tf.random.stateless_*` ops with its "
    "numbers as seeds"
)


def _step_lines(step: Step, is_resumed_mid_pass: bool) -> Iterator[str]:
    if not step.deterministic:
        yield (
            "deterministic=False changes the order of elements. Remove it; TensorFlow Datasets "
            "sets it with shuffle_files=True, except with read_config=tfds.ReadConfig("
            "shuffle_seed=1)"
        )
    for title in step.unseeded_inside:
        yield (
            f"its function creates a dataset with a `{title}` that has no seed. Write "
            f"`{title}(..., seed=1)`"
        )
    for op, seeded in step.random_ops:
        if not seeded:
            yield f"{op} has no seed. Set one, or better {_STATELESS}"
        elif step.parallel and not pipeline.is_op_determinism_on():
            yield (
                f"{op} runs in parallel calls, so which element gets which number differs in "
                "every run. Remove num_parallel_calls, call "
                f"tf.config.experimental.enable_op_determinism(), or better {_STATELESS}"
            )
    if step.changes_variables and step.parallel and not pipeline.is_op_determinism_on():
        yield (
            "it changes variables (as Keras' random layers and tf.random.Generator do) in parallel "
            "calls, whose order differs in every run. Remove num_parallel_calls, or call "
            "tf.config.experimental.enable_op_determinism()"
        )
    if step.python_ops and is_resumed_mid_pass:
        if step.title == FROM_GENERATOR:
            yield (
                "to resume, the generator is run again for all earlier batches of the pass, and "
                "must yield the same as before. A keras.utils.PyDataset continues at any batch "
                "without making the earlier ones"
            )
        else:
            yield (
                f"it calls Python ({', '.join(step.python_ops)}). To resume, it is called again "
                "for all earlier batches of the pass, and must return the same as before: make its "
                "result depend on its arguments only"
            )


def chain(parts: pipeline.Pipeline) -> Mapping[str, str]:
    """Returns the transformations, numbered, with the arguments that affect their result. The size
    of the global batch is not included."""
    steps = [step for step in parts.steps if step.title not in _IRRELEVANT]
    batch = parts.global_batch
    return {
        f"step {number}": _description(step, () if step == batch else ("batch_size",))
        for number, step in enumerate(steps)
    }


def seeds(parts: pipeline.Pipeline) -> str:
    """Returns the seeds of the transformations that have one, in order."""
    return "; ".join(f"{step.numbers['seed']}, {step.numbers['seed2']}" for step in seeded(parts))


def seeded(parts: pipeline.Pipeline) -> list[Step]:
    """Returns the transformations that have seeds."""
    return [step for step in parts.steps if step.is_seeded and "seed" in step.numbers]


def _description(step: Step, more: Sequence[str]) -> str:
    names = sorted((*_RELEVANT, *more))
    numbers = {name: step.numbers[name] for name in names if name in step.numbers}
    if step.samples is not None:
        numbers["samples"] = step.samples
    return f"{step.title}({', '.join(f'{name}={value}' for name, value in numbers.items())})"
