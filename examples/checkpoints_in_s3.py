"""Checkpoints in S3, or in a store with the same API: Ceph, MinIO, R2.

    pip install s3fs

    python examples/checkpoints_in_s3.py --url s3://bucket/runs/digits
    python examples/checkpoints_in_s3.py --url s3://bucket/runs/digits --endpoint https://host:9000

    pip install 'moto[server]'
    python examples/checkpoints_in_s3.py          # with a local S3 server, in this process's memory

trains a small network on handwritten digits for three epochs, in a process that then ends, and
resumes from the store for three more in another one: only the bucket's contents remain of the first
training. Keys are read from the same places as by Amazon's own tools: AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY, ~/.aws.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import digits
import keras

import keras_distplug as kd


def train(url: str, options: Mapping[str, str], epochs: int) -> None:
    keras.utils.set_random_seed(7)
    (x_train, y_train), test = digits.load()
    model = keras.Sequential(
        [
            keras.Input(x_train.shape[1:]),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        x_train,
        y_train,
        batch_size=64,
        epochs=epochs,
        validation_data=test,
        verbose=2,
        callbacks=kd.defaults(url, storage_options=options),
    )
    accuracy = history.history["val_accuracy"]
    print(f"validation accuracy {accuracy[-1]:.4f} after {len(accuracy)} epochs", flush=True)


def main(url: str, options: Mapping[str, str]) -> int:
    endpoint = [f"--endpoint={each}" for each in options.values()]
    for epochs in (3, 6):  # the second process resumes from the checkpoint in the bucket
        command = [sys.executable, __file__, "--url", url, "--epochs", str(epochs), *endpoint]
        subprocess.run(command, check=True)
    command = [sys.executable, "-m", "keras_distplug", "ls", url]  # `keras-distplug ls URL`
    return subprocess.run([*command, "--storage-options", json.dumps(options)]).returncode


@contextmanager
def local_s3() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yields a folder in an empty bucket, and its `storage_options`. It lives in this process."""
    try:
        import s3fs
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise SystemExit(
            "Without --url, this example starts a local store, which needs packages that are not "
            f"installed ({error}). Run pip install s3fs 'moto[server]', or "
            "pass --url."
        ) from error
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise it logs every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}"}
    # The server accepts any keys, but requires some.
    os.environ.update(AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any")
    s3fs.S3FileSystem(**options).mkdir("bucket")
    try:
        yield "s3://bucket/runs/digits", options
    finally:
        server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="the folder, such as s3://bucket/runs/digits")
    parser.add_argument(
        "--endpoint", metavar="URL", help="the endpoint of a store other than Amazon's"
    )
    parser.add_argument("--epochs", type=int, help="train once, for this many epochs")
    arguments = parser.parse_args()
    if (arguments.endpoint or arguments.epochs) and not arguments.url:
        parser.error("--endpoint and --epochs require --url, the folder in the store")
    with ExitStack() as stack:
        if arguments.url:
            place = arguments.url
            given = {"endpoint_url": arguments.endpoint} if arguments.endpoint else {}
            if arguments.epochs:
                train(place, given, arguments.epochs)
                sys.exit()
        else:
            place, given = stack.enter_context(local_s3())
        sys.exit(main(place, given))
