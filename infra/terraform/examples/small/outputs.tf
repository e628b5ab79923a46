locals {
  settings = join("\n", [
    "# What rollflow reads on the machine: rollflow doctor --settings /etc/rollflow/settings.toml",
    "[variables]",
    "AWS_REGION = ${jsonencode(var.region)}",
    "ROLLFLOW_HOME = \"/var/lib/rollflow/home\"",
    "",
    "[store]",
    "uri = ${jsonencode("s3://${module.bucket.name}/store")}",
    "",
  ])
}

output "settings" {
  description = "The settings that rollflow reads, as a file: terraform output -raw settings > settings.toml"
  value       = local.settings
}

output "machine" {
  description = "Id of the machine: aws ssm start-session --target ID"
  value       = module.machine.id
}
