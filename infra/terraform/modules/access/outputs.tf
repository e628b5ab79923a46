output "profiles" {
  description = "Instance profiles by kind of machine."
  value       = { for key, profile in aws_iam_instance_profile.machine : key => profile.name }
  depends_on  = [aws_iam_role_policy.machine]
}

output "roles" {
  description = "Names of the roles by kind of machine."
  value       = { for key, role in aws_iam_role.machine : key => role.name }
}

output "secrets" {
  description = "Full names of the secrets in Secrets Manager, by their names here."
  value       = { for key in concat(keys(var.secrets), keys(var.secrets_made_later)) : key => "${var.name}/${key}" }
  depends_on  = [aws_secretsmanager_secret_version.this, aws_secretsmanager_secret.made_later]
}
