# One GPU machine and a bucket. All processes run on the machine; Ray, Prefect and MLflow start and end with a run.

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
  zones  = 1
}

module "access" {
  source      = "../../modules/access"
  name        = var.name
  bucket_arn  = module.bucket.arn
  kms_key_arn = var.kms_key_arn
  roles       = { machine = { description = "The machine of ${var.name}: its store and Session Manager" } }
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

module "machine" {
  source             = "../../modules/machine"
  name               = "${var.name}-machine"
  image_id           = data.aws_ssm_parameter.image.insecure_value
  instance_type      = var.instance_type
  disk_gib           = var.disk_gib
  kms_key_arn        = var.kms_key_arn
  profile            = module.access.profiles["machine"]
  security_group_ids = [module.network.members_security_group_id]
  subnet_id          = module.network.subnets[0].id
  user_data = join("\n", [module.software.install_script, templatefile("${path.module}/start.sh.tftpl", {
    settings  = local.settings
    variables = local.variables
  })])
}
