locals {
  head_ip   = cidrhost(cidrsubnet(var.cidr, 4, 0), 10)
  store_uri = "s3://${module.bucket.name}/store"

  # The environment of every node. The files that it names exist while Ray runs.
  node_variables = {
    AWS_REGION          = var.region
    AWS_DEFAULT_REGION  = var.region # read by botocore, for example in MLflow's server
    ROLLFLOW_HOME       = "/var/lib/rollflow/home"
    ROLLFLOW_STORE      = local.store_uri
    RAY_AUTH_MODE       = "token"
    RAY_AUTH_TOKEN_PATH = "/run/rollflow-ray/token"
    RAY_USE_TLS         = "1"
    RAY_TLS_SERVER_CERT = "/run/rollflow-ray/node.crt"
    RAY_TLS_SERVER_KEY  = "/run/rollflow-ray/node.key"
    RAY_TLS_CA_CERT     = "/run/rollflow-ray/ca.crt"
  }
  variables = merge(local.node_variables, { PREFECT_API_URL = "http://127.0.0.1:4200/api" })

  settings = join("\n", concat(
    [
      "# What rollflow reads on the control machine: rollflow doctor --settings /etc/rollflow/settings.toml",
      "[variables]",
    ],
    [for name, value in local.variables : "${name} = ${jsonencode(value)}"],
    [
      "",
      "[cluster]",
      "address = ${jsonencode("${local.head_ip}:6379")}",
      "[cluster.placement]",
      "engine = { resource = \"rollout\" }",
      "learner = { resource = \"train\" }",
      "",
      "[tracking]",
      "uri = \"http://127.0.0.1:5000\"",
      "",
    ],
  ))
}

output "settings" {
  description = "The settings that rollflow reads, as a file: terraform output -raw settings > settings.toml"
  value       = local.settings
}

output "control" {
  description = "Id of the control machine: aws ssm start-session --target ID"
  value       = module.control.machine
}
