output "name" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.store.bucket
  depends_on  = [aws_s3_bucket_policy.store, aws_s3_bucket_server_side_encryption_configuration.store]
}

output "arn" {
  description = "ARN of the bucket."
  value       = local.arn
}
