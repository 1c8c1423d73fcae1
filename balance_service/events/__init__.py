"""What comes in: the source topic, decoded on Spark, in micro-batches."""
