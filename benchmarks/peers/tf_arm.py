"""The turn of TensorFlow's parameter servers in `evaluate.py`: the language model, trained asynchronously.

It runs in an environment of its own (`setup.sh`). Each rank is a worker and a server, rank 0 the coordinator as well,
whose process is this one. Tables are cut into as many parts as there are servers, with rows renumbered so that
row r lies on server r mod N, since frequent words would all be on server 0. Each of N workers makes its own update, so
the loss is comparable with others' for one machine only. Ways: ids looked up as they come, and made unique before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")  # as TensorFlow's guide to parameter servers sets it

import numpy as np
import tensorflow as tf
from turns import WARM_UP, WARM_UP_LIMITED, ask, settings, tell

NUM = int(os.environ["WORLD_SIZE"])
EPSILON = 1e-10
"""Of PyTorch's Adagrad."""


def main() -> None:
    folder = Path(sys.argv[1])
    if "TF_CONFIG" in os.environ:
        serve()
    ended = folder / "ended"
    tasks = [start("ps"), start("worker")]
    try:
        if os.environ["RANK"] == "0":
            coordinate(folder)
            ended.touch()
        while not ended.exists():
            if any(task.poll() is not None for task in tasks):
                sys.exit("a server or worker has ended")
            time.sleep(0.1)
    finally:
        for task in tasks:  # they serve for ever
            task.kill()
    sys.stdout.flush()
    os._exit(0)


def config(kind: str, index: int) -> str:
    """TF_CONFIG: the cluster, with ports that no other job has, and the task of a process."""
    port = 20000 + 100 * (int(os.environ["MASTER_PORT"]) - 29500)
    where = [divmod(rank, int(os.environ["LOCAL_WORLD_SIZE"])) for rank in range(NUM)]
    cluster = {
        name: [f"machine{machine}:{port + 2 * local + k}" for machine, local in where]
        for k, name in enumerate(("ps", "worker"))
    }
    return json.dumps(
        {"cluster": {**cluster, "chief": [f"machine0:{port + 99}"]}, "task": {"type": kind, "index": index}}
    )


def start(kind: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *sys.argv], env={**os.environ, "TF_CONFIG": config(kind, int(os.environ["RANK"]))}
    )


def serve() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    threads = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=max(4, NUM + 1))
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=threads,
        start=True,
    )
    server.join()


def coordinate(folder: Path) -> None:
    args, arrays = settings(folder), dict(np.load(folder / "arrays.npz"))
    os.environ["TF_CONFIG"] = config("chief", 0)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(max(4, NUM + 1))
    num_rows = NUM * -(-args.words // NUM)
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        variable_partitioner=lambda shape, dtype, axis=0: [NUM if shape[0] == num_rows else 1] + [1] * (len(shape) - 1),
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    for unique in (False, True):
        model = Model(strategy, renumbered(arrays, args.words), args.lr, unique)
        take_turn(args, folder, coordinator, model, way="unique ids" if unique else "plain")


def renumbered(arrays: dict[str, np.ndarray], words: int) -> dict[str, np.ndarray]:
    """Tables and ids, row r being row (r mod N) * words / N + r / N of the result."""
    block, found = -(-words // NUM), {}
    for name, array in arrays.items():
        if name in ("embedding.weight", "softmax_weight.weight", "softmax_bias.weight"):
            padded = np.pad(array, ((0, NUM * block - words), (0, 0)))
            array = padded.reshape(block, NUM, -1).swapaxes(0, 1).reshape(NUM * block, -1)
        elif name in ("tokens", "samples"):
            array = array % NUM * block + array // NUM
        found[name] = array
    return found


class Model:
    """`models.LM`, its batches, and Adagrad, whose updates run on the servers."""

    def __init__(self, strategy: Any, arrays: dict[str, np.ndarray], lr: float, unique: bool) -> None:
        self.strategy, self.lr, self.unique = strategy, lr, unique
        self.arrays = {name: arrays.pop(name) for name in ("tokens", "samples", "log_expected")}
        with strategy.scope():
            self.of = {name: tf.Variable(array, name=name.replace(".", "_")) for name, array in arrays.items()}
        self.parts = [p for v in self.of.values() for p in getattr(v, "variables", [v])]
        self.accumulators = []
        for part in self.parts:
            with strategy.scope(), strategy.extended.colocate_vars_with(part):
                self.accumulators.append(tf.Variable(tf.fill(part.shape, 0.1), trainable=False))

    def data(self) -> tf.data.Dataset:
        """All workers' batches in turn; each worker starts anywhere."""
        arrays = [tf.constant(array) for array in self.arrays.values()]
        num = len(self.arrays["tokens"])
        first = tf.random.uniform([], 0, num if NUM > 1 else 1, tf.int64)
        return tf.data.Dataset.range(1 << 40).map(lambda k: [array[(first + k) % num] for array in arrays]).prefetch(2)

    def train(self, batch: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = self.loss(*batch)
        for variable, accumulator, gradient in zip(
            self.parts, self.accumulators, tape.gradient(loss, self.parts), strict=True
        ):
            with tf.device(variable.device):
                self.update(variable, accumulator, gradient)
        return loss

    def update(self, variable: Any, accumulator: Any, gradient: Any) -> None:
        common = {"var": variable.handle, "accum": accumulator.handle, "lr": self.lr, "epsilon": EPSILON}
        if isinstance(gradient, tf.IndexedSlices):
            ids, rows = gradient.indices, gradient.values
            if not self.unique:
                ids, at = tf.unique(ids)
                rows = tf.math.unsorted_segment_sum(rows, at, tf.shape(ids)[0])
            tf.raw_ops.ResourceSparseApplyAdagradV2(**common, grad=rows, indices=ids)
        else:
            tf.raw_ops.ResourceApplyAdagradV2(**common, grad=gradient)

    def rows(self, ids: tf.Tensor, *names: str) -> list[tf.Tensor]:
        at = None
        if self.unique:
            ids, at = tf.unique(ids)
        found = [tf.nn.embedding_lookup(getattr(self.of[n], "variables", self.of[n]), ids) for n in names]
        return found if at is None else [tf.gather(rows, at) for rows in found]

    def loss(self, tokens: tf.Tensor, samples: tf.Tensor, log_expected: tf.Tensor) -> tf.Tensor:
        size, time_steps = tokens.shape[0], tokens.shape[1] - 1
        (embedded,) = self.rows(tf.reshape(tokens[:, :-1], [-1]), "embedding.weight")
        hidden = tf.matmul(self.lstm(embedded, size, time_steps), self.dense("projection.weight"), transpose_b=True)
        hidden += self.dense("projection.bias")
        targets, n = tf.reshape(tokens[:, 1:], [-1]), size * time_steps
        weight, bias = self.rows(tf.concat([targets, samples], 0), "softmax_weight.weight", "softmax_bias.weight")
        bias = bias[:, 0] - log_expected
        own = tf.reduce_sum(hidden * weight[:n], 1) + bias[:n]
        others = tf.matmul(hidden, weight[n:], transpose_b=True) + bias[n:]
        others = tf.where(targets[:, None] == samples[None, :], -1e9, others)
        return tf.reduce_mean(tf.reduce_logsumexp(tf.concat([own[:, None], others], 1), 1) - own)

    def lstm(self, rows: tf.Tensor, size: int, time_steps: int) -> tf.Tensor:
        """Of shape (batch * time, hidden); TensorFlow's fused kernel for CPUs (BlockLSTMV2) is slower."""
        weight = self.dense("lstm.weight_hh_l0")
        bias = self.dense("lstm.bias_ih_l0") + self.dense("lstm.bias_hh_l0")
        gates = tf.matmul(rows, self.dense("lstm.weight_ih_l0"), transpose_b=True) + bias
        h = c = tf.zeros([size, weight.shape[1]])
        outputs = []
        for of_time in tf.unstack(tf.reshape(gates, [size, time_steps, -1]), axis=1):
            i, f, g, o = tf.split(of_time + tf.matmul(h, weight, transpose_b=True), 4, axis=1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
            h = tf.sigmoid(o) * tf.tanh(c)
            outputs.append(h)
        return tf.reshape(tf.stack(outputs, 1), [-1, weight.shape[1]])

    def dense(self, name: str) -> tf.Tensor:
        return tf.convert_to_tensor(self.of[name])


def take_turn(args: Any, folder: Path, coordinator: Any, model: Model, **facts: object) -> None:
    """As `turns.take`, but nobody waits for anybody: a step is one update by each worker, on average."""

    @tf.function
    def train(data: Any) -> tf.Tensor:
        return model.strategy.run(model.train, args=(next(data),))

    data = iter(coordinator.create_per_worker_dataset(model.data))

    def steps(number: int) -> list[Any]:
        results = [coordinator.schedule(train, args=(data,)) for _ in range(number * NUM)]
        coordinator.join()
        return results

    ask(folder, "links unlimited")
    ran: set[int] = set()
    while len(ran) < NUM:  # whoever is free takes the next, and some have to build their graph first
        ran |= {worker_of(result) for result in steps(1)}
    steps(WARM_UP - 1)
    ask(folder, "links limited")
    start = time.perf_counter()
    loss = float(steps(WARM_UP_LIMITED)[-1].fetch())
    num_steps = max(2, round(args.seconds / ((time.perf_counter() - start) / WARM_UP_LIMITED)))
    before = counters(folder)
    start = time.perf_counter()
    steps(num_steps)
    seconds = time.perf_counter() - start
    sent, received = (
        [(now[k] - then[k]) / num_steps / 1e6 for then, now in zip(before, counters(folder), strict=True)]
        for k in (0, 1)
    )
    tell(
        **facts,
        rank=0,
        steps=num_steps,
        seconds=seconds,
        sent_mb=sum(sent) / len(sent),
        received_mb=max(received),
        loss=loss,
    )


def worker_of(result: Any) -> int:
    return tf.DeviceSpec.from_string(result._values.device).task


def counters(folder: Path) -> list[tuple[int, int]]:
    """Bytes that each machine has sent and received."""
    ask(folder, "counters")
    return json.loads((folder / "counters.json").read_text())


if __name__ == "__main__":
    main()
