"""Archives, reports and replays by Spark."""
