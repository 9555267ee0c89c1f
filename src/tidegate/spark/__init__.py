"""Tidegate on Spark: a session set up for this machine, topics and tables as DataFrames and streams.

    spark = tidegate.spark.session()                     # or: tidegate.spark.register(your_session)
    spark.read.format("tidegate").option("log", "./data/log").option("topic", "orders").load()
    spark.read.format("tidegate.table").option("state", "./data/state").option("table", "counts").load()

Importing this package loads neither pyspark nor a JVM.
"""

from tidegate.spark.session import check_session, register, session

__all__ = ["check_session", "register", "session"]
