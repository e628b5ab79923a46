# A Ray cluster: a head, a group of rollout machines on spot instances that grows while actors wait for a GPU, and a
# fixed group of train machines. Processes need the token and a certificate of the cluster's authority.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 6.0" }
  }
}

locals {
  address = "${var.head_ip}:6379"
  subnets = [for subnet in var.subnets : subnet.id]
  options = {
    head    = "--head --port=6379 --dashboard-host=127.0.0.1 --num-gpus=0"
    rollout = "--address=${local.address} \"--resources={\\\"rollout\\\":1}\""
    train   = "--address=${local.address} \"--resources={\\\"train\\\":1}\""
    driver  = "--address=${local.address} --num-cpus=0"
  }
  scripts = { for kind, options in local.options : kind => join("\n", [
    var.install_script,
    templatefile("${path.module}/node.sh.tftpl", {
      options     = options
      token       = var.token_secret
      authority   = var.authority_secret
      variables   = var.variables
      credentials = templatefile("${path.module}/credentials.sh.tftpl", { is_head = kind == "head" })
    }),
  ]) }
  demand = templatefile("${path.module}/demand.sh.tftpl", {
    address   = local.address
    namespace = "rollflow/${var.name}"
    program   = file("${path.module}/gpu_demand.py")
  })
  groups = {
    rollout = { type = var.rollout.instance_types[0], profile = var.profiles.node, script = local.scripts["rollout"] }
    train   = { type = var.train.instance_type, profile = var.profiles.node, script = local.scripts["train"] }
  }
}

data "aws_default_tags" "here" {}

module "head" {
  source             = "../machine"
  name               = "${var.name}-head"
  image_id           = var.head_image_id
  instance_type      = var.head_instance_type
  disk_gib           = var.disk_gib
  kms_key_arn        = var.kms_key_arn
  profile            = var.profiles.head
  security_group_ids = [var.members_security_group_id]
  subnet_id          = local.subnets[0]
  private_ip         = var.head_ip
  user_data          = join("\n", [local.scripts["head"], local.demand])
}

resource "aws_launch_template" "group" {
  for_each               = local.groups
  name                   = "${var.name}-${each.key}"
  image_id               = var.image_id
  instance_type          = each.value.type
  user_data              = base64gzip(each.value.script)
  update_default_version = true
  tags                   = { Name = "${var.name}-${each.key}" }

  iam_instance_profile {
    name = each.value.profile
  }

  network_interfaces {
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = [var.members_security_group_id]
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = var.disk_gib
      volume_type           = "gp3"
      encrypted             = true
      kms_key_id            = var.kms_key_arn
      delete_on_termination = true
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  # The provider's default tags do not apply to resources that a launch template starts.
  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]
    content {
      resource_type = tag_specifications.value
      tags          = merge(data.aws_default_tags.here.tags, { Name = "${var.name}-${each.key}" })
    }
  }

  lifecycle {
    precondition {
      condition     = startswith(each.value.script, "#!/bin/bash") && length(base64gzip(each.value.script)) <= 21848
      error_message = "User data begins with #!/bin/bash, and has at most 16 KiB when it is compressed."
    }
  }
}

resource "aws_autoscaling_group" "rollout" {
  name                      = "${var.name}-rollout"
  min_size                  = var.rollout.min
  max_size                  = var.rollout.max
  vpc_zone_identifier       = local.subnets
  health_check_type         = "EC2"
  capacity_rebalance        = true
  wait_for_capacity_timeout = "0"

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = "price-capacity-optimized"
    }
    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.group["rollout"].id
        version            = "$Latest"
      }
      dynamic "override" {
        for_each = var.rollout.instance_types
        content {
          instance_type = override.value
        }
      }
    }
  }

  dynamic "tag" {
    for_each = merge(data.aws_default_tags.here.tags, { Name = "${var.name}-rollout" })
    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }
}

resource "aws_autoscaling_group" "train" {
  name                      = "${var.name}-train"
  min_size                  = var.train.count
  max_size                  = var.train.count
  vpc_zone_identifier       = [local.subnets[0]] # one zone, that of the head, because ranks exchange gradients
  health_check_type         = "EC2"
  wait_for_capacity_timeout = "0"

  launch_template {
    id      = aws_launch_template.group["train"].id
    version = "$Latest"
  }

  dynamic "tag" {
    for_each = merge(data.aws_default_tags.here.tags, { Name = "${var.name}-train" })
    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }
}
