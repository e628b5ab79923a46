-- Run once, by the Postgres image, when its volume is empty. The last one is what the health check waits for.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
