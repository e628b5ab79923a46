# One machine in a private subnet, with an encrypted disk, no public address, tokens for the metadata service (IMDSv2),
# and user data without a secret. A changed script or setting replaces the machine; a newer image alone does not.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 6.0" }
  }
}

resource "aws_instance" "this" {
  ami                         = var.image_id
  instance_type               = var.instance_type
  subnet_id                   = var.subnet_id
  private_ip                  = var.private_ip
  associate_public_ip_address = false
  vpc_security_group_ids      = var.security_group_ids
  iam_instance_profile        = var.profile
  user_data_base64            = base64gzip(var.user_data)
  user_data_replace_on_change = true
  tags                        = { Name = var.name }

  root_block_device {
    volume_size           = var.disk_gib
    volume_type           = "gp3"
    encrypted             = true
    kms_key_id            = var.kms_key_arn
    delete_on_termination = true
  }

  # With a limit of one hop, a process in a container cannot get the credentials of the machine's role.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  lifecycle {
    ignore_changes = [ami]
  }
}
