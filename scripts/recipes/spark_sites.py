"""A Spark Structured Streaming query whose micro-batches become one model.

    pip install pyspark pandas && python scripts/recipes/spark_sites.py

Needs Java. Every partition of a micro-batch is a site: its rows go to a branch of the
model, and the driver merges what comes back.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import sites
import torch
from pyspark.sql import DataFrame, SparkSession


class Stream:
    """The model of the driver, one micro-batch after the other."""

    def __init__(self) -> None:
        self.state = pickle.dumps(sites.new_model())

    def learn(self, frame: DataFrame, batch: int) -> None:
        """What ``foreachBatch`` calls."""
        base = frame.sparkSession.sparkContext.broadcast(self.state)

        def partition(rows: Iterator[Any]) -> Iterator[bytes]:
            data = torch.tensor([(row.x, row.y) for row in rows])
            if len(data):
                yield sites.work(base.value, [(data[:, 0], data[:, 1])])

        states = frame.select("x", "y").rdd.mapPartitions(partition).collect()
        if states:
            self.state = sites.joined(states, self.state)
            print(sites.report(batch, self.state), flush=True)


if __name__ == "__main__":
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.sql.shuffle.partitions", "3")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.sparkContext.addPyFile(sites.__file__)
    numbers = spark.readStream.format("rate").option("rowsPerSecond", 60).load()
    frame = numbers.selectExpr("(value * 0.37D) % 11D AS x").selectExpr(
        "x", "sin(x) + 0.1 * randn() AS y"
    )
    stream = Stream()
    query = (
        frame.repartition(3)
        .writeStream.foreachBatch(stream.learn)
        .trigger(processingTime="5 seconds")
        .start()
    )
    query.awaitTermination(60)
    while query.status["isTriggerActive"]:  # a stop would interrupt the micro-batch
        time.sleep(0.1)
    query.stop()
    spark.stop()
