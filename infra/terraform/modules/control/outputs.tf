output "machine" {
  description = "Id of the control machine: aws ssm start-session --target ID"
  value       = module.machine.id
}
