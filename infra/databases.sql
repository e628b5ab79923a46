-- The Postgres image runs this file once, when its volume is empty. The health check waits for the last database.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
