# Bucket, Ray cluster, Prefect, MLflow and their database. Supervisors run on the control machine.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = "5.100.0" }
  }
}

provider "aws" {
  region = var.region
  default_tags {
    tags = { rollflow = var.name }
  }
}

data "aws_ssm_parameter" "image" {
  name = var.image_parameter
}

data "aws_ssm_parameter" "gpu_image" {
  name = var.gpu_image_parameter
}

module "bucket" {
  source           = "../../modules/bucket"
  name             = var.bucket
  kms_key_arn      = var.kms_key_arn
  keep_pruned_days = var.keep_pruned_days
  force_destroy    = var.delete_runs_on_destroy
}

module "network" {
  source = "../../modules/network"
  name   = var.name
  cidr   = var.cidr
  zones  = 2
}

module "access" {
  source      = "../../modules/access"
  name        = var.name
  bucket_arn  = module.bucket.arn
  kms_key_arn = var.kms_key_arn
  secrets = {
    ray-token    = "Token of the Ray cluster"
    prefect-auth = "Password of Prefect's API, for the user rollflow"
  }
  secrets_made_later   = { ray-authority = "Key and certificate of the authority that signs the certificates of Ray's nodes" }
  secret_values        = { for key, value in { ray-token = var.ray_token, prefect-auth = var.prefect_password } : key => value if value != null }
  secrets_version      = var.secrets_version
  secret_recovery_days = var.delete_runs_on_destroy ? 0 : 7
  roles = {
    head = {
      description = "The Ray head of ${var.name}"
      reads       = ["ray-token", "ray-authority"]
      writes      = ["ray-authority"]
      metrics     = true
    }
    node = {
      description = "Rollout and train machines of ${var.name}"
      reads       = ["ray-token", "ray-authority"]
    }
    control = {
      description = "The control machine of ${var.name}"
      reads       = ["ray-token", "ray-authority", "prefect-auth"]
    }
  }
}

module "software" {
  source = "../../modules/software"
  bucket = module.bucket.name
  wheel  = var.wheel
  pins   = var.pins
}

module "budget" {
  source            = "../../modules/budget"
  name              = var.name
  dollars_per_month = var.dollars_per_month
  emails            = var.emails
}

module "ray" {
  source                    = "../../modules/ray"
  name                      = var.name
  head_image_id             = data.aws_ssm_parameter.image.insecure_value
  image_id                  = data.aws_ssm_parameter.gpu_image.insecure_value
  subnets                   = module.network.subnets
  head_ip                   = local.head_ip
  members_security_group_id = module.network.members_security_group_id
  profiles                  = { head = module.access.profiles["head"], node = module.access.profiles["node"] }
  install_script            = module.software.install_script
  variables                 = local.node_variables
  token_secret              = module.access.secrets["ray-token"]
  authority_secret          = module.access.secrets["ray-authority"]
  head_instance_type        = var.head_instance_type
  rollout                   = var.rollout
  train                     = var.train
  disk_gib                  = var.disk_gib
  kms_key_arn               = var.kms_key_arn
}

module "control" {
  source                    = "../../modules/control"
  name                      = var.name
  vpc_id                    = module.network.vpc_id
  subnets                   = module.network.subnets
  members_security_group_id = module.network.members_security_group_id
  image_id                  = data.aws_ssm_parameter.image.insecure_value
  instance_type             = var.control_instance_type
  role                      = module.access.roles["control"]
  profile                   = module.access.profiles["control"]
  driver_script             = module.ray.driver_script
  prefect_secret            = module.access.secrets["prefect-auth"]
  store_uri                 = local.store_uri
  settings                  = local.settings
  database                  = var.database
  delete_runs_on_destroy    = var.delete_runs_on_destroy
  kms_key_arn               = var.kms_key_arn
}
