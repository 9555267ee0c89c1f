"""Tidegate on Spark: a session set up for this machine, and topics as DataFrames and streams.

    spark = tidegate.spark.session()                     # or: tidegate.spark.register(your_session)
    spark.read.format("tidegate").option("log", "./data/log").option("topic", "orders").load()

Importing this package loads neither pyspark nor a JVM.
"""

from tidegate.spark.session import register, session

__all__ = ["register", "session"]
