output "id" {
  description = "Id of the machine: aws ssm start-session --target ID"
  value       = aws_instance.this.id
}
