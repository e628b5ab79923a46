locals {
  variables = {
    AWS_REGION         = var.region
    AWS_DEFAULT_REGION = var.region # read by botocore, for example in MLflow's server
    ROLLFLOW_HOME      = "/var/lib/rollflow/home"
    ROLLFLOW_STORE     = "s3://${module.bucket.name}/store"
  }
  settings = join("\n", concat(
    [
      "# What rollflow reads on the machine: rollflow doctor --settings /etc/rollflow/settings.toml",
      "[variables]",
    ],
    [for name, value in local.variables : "${name} = ${jsonencode(value)}"],
    [""],
  ))
}

output "settings" {
  description = "The settings that rollflow reads, as a file: terraform output -raw settings > settings.toml"
  value       = local.settings
}

output "machine" {
  description = "Id of the machine: aws ssm start-session --target ID"
  value       = module.machine.id
}
