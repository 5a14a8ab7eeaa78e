// A worker on SQS, with the AWS SDK for Go: mqks serve --sqs-port 9324, then go run worker.go.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
)

func env(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func work(ctx context.Context, client *sqs.Client) error {
	made, err := client.CreateQueue(ctx, &sqs.CreateQueueInput{QueueName: aws.String("chores")})
	if err != nil {
		return err
	}
	for _, job := range []string{"mow", "rake", "water"} {
		job := &sqs.SendMessageInput{QueueUrl: made.QueueUrl, MessageBody: aws.String(job)}
		if _, err := client.SendMessage(ctx, job); err != nil {
			return err
		}
	}
	for {
		wanted := &sqs.ReceiveMessageInput{QueueUrl: made.QueueUrl, WaitTimeSeconds: 1}
		received, err := client.ReceiveMessage(ctx, wanted)
		if err != nil || len(received.Messages) == 0 {
			return err
		}
		for _, message := range received.Messages {
			fmt.Println("done:", *message.Body)
			done := &sqs.DeleteMessageInput{
				QueueUrl:      made.QueueUrl,
				ReceiptHandle: message.ReceiptHandle,
			}
			if _, err := client.DeleteMessage(ctx, done); err != nil {
				return err
			}
		}
	}
}

func main() {
	endpoint := env("AWS_ENDPOINT_URL_SQS", "http://localhost:9324")
	keys := credentials.NewStaticCredentialsProvider(
		env("AWS_ACCESS_KEY_ID", "any"), env("AWS_SECRET_ACCESS_KEY", "any"), "")
	client := sqs.New(sqs.Options{
		Region:           "us-east-1",
		Credentials:      keys,
		EndpointResolver: sqs.EndpointResolverFromURL(endpoint),
	})
	if err := work(context.Background(), client); err != nil {
		log.Fatal(err)
	}
}
