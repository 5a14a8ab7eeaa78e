"""A worker on SQS, with boto3: mqks serve --sqs-port 9324, then this file, with "send" first."""

import os
import sys

import boto3

sqs = boto3.client(
    "sqs",
    endpoint_url=os.environ.get("AWS_ENDPOINT_URL_SQS", "http://localhost:9324"),
    region_name="us-east-1",
    aws_access_key_id=os.environ.get("AWS_ACCESS_KEY_ID", "any"),
    aws_secret_access_key=os.environ.get("AWS_SECRET_ACCESS_KEY", "any"),
)
queue = sqs.create_queue(QueueName="chores", Attributes={"VisibilityTimeout": "60"})["QueueUrl"]

if sys.argv[1:] == ["send"]:
    for job in ("mow", "rake", "water"):
        sqs.send_message(QueueUrl=queue, MessageBody=job)
    sys.exit()

while received := sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=1).get("Messages"):
    for message in received:
        print("done:", message["Body"])
        sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
