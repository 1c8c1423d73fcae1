"""What comes in: the source topic, decoded on Spark, and pulled by the tasks."""
