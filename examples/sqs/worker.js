// A worker on SQS, with sqs-consumer: mqks serve --sqs-port 9324, then npm install, npm start.
import { CreateQueueCommand, SendMessageCommand, SQSClient } from "@aws-sdk/client-sqs";
import { Consumer } from "sqs-consumer";

const sqs = new SQSClient({
  endpoint: process.env.AWS_ENDPOINT_URL_SQS ?? "http://localhost:9324",
  region: "us-east-1",
  credentials: {
    accessKeyId: process.env.AWS_ACCESS_KEY_ID ?? "any",
    secretAccessKey: process.env.AWS_SECRET_ACCESS_KEY ?? "any",
  },
});
const { QueueUrl: queueUrl } = await sqs.send(new CreateQueueCommand({ QueueName: "chores" }));
for (const MessageBody of ["mow", "rake", "water"]) {
  await sqs.send(new SendMessageCommand({ QueueUrl: queueUrl, MessageBody }));
}

const consumer = Consumer.create({
  sqs,
  queueUrl,
  handleMessage: async (message) => {
    console.log("done:", message.Body);
    return message; // It is deleted.
  },
});
consumer.on("error", (error) => console.error(error.message));
consumer.on("empty", () => consumer.stop());
consumer.start();
