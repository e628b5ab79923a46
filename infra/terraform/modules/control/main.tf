# The machine that supervises runs, with the Prefect server and worker and the MLflow server, all on loopback, and one
# PostgreSQL for both. RDS creates and rotates the database's password, in a secret that only this machine may read.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 6.0" }
  }
}

resource "aws_security_group" "control" {
  name        = "${var.name}-control"
  description = "The control machine of ${var.name}: it alone reaches the database"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-control" }
}

resource "aws_security_group" "database" {
  name        = "${var.name}-database"
  description = "The database of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = { Name = "${var.name}-database" }
}

resource "aws_vpc_security_group_egress_rule" "control" {
  security_group_id            = aws_security_group.control.id
  description                  = "to the database"
  referenced_security_group_id = aws_security_group.database.id
  ip_protocol                  = "tcp"
  from_port                    = 5432
  to_port                      = 5432
  tags                         = { Name = "${var.name}-to-database" }
}

resource "aws_vpc_security_group_ingress_rule" "database" {
  security_group_id            = aws_security_group.database.id
  description                  = "from the control machine"
  referenced_security_group_id = aws_security_group.control.id
  ip_protocol                  = "tcp"
  from_port                    = 5432
  to_port                      = 5432
  tags                         = { Name = "${var.name}-from-control" }
}

resource "aws_db_subnet_group" "this" {
  name       = var.name
  subnet_ids = [for subnet in var.subnets : subnet.id]
}

resource "aws_db_parameter_group" "this" {
  name   = "${var.name}-postgres17"
  family = "postgres17"
  parameter {
    name  = "rds.force_ssl"
    value = "1"
  }
}

resource "aws_db_instance" "this" {
  identifier                    = var.name
  engine                        = "postgres"
  engine_version                = "17"
  instance_class                = var.database.instance_class
  allocated_storage             = var.database.disk_gib
  max_allocated_storage         = 4 * var.database.disk_gib
  storage_type                  = "gp3"
  storage_encrypted             = true
  kms_key_id                    = var.kms_key_arn
  db_name                       = "prefect"
  username                      = "rollflow"
  manage_master_user_password   = true
  master_user_secret_kms_key_id = var.kms_key_arn
  db_subnet_group_name          = aws_db_subnet_group.this.name
  parameter_group_name          = aws_db_parameter_group.this.name
  vpc_security_group_ids        = [aws_security_group.database.id]
  publicly_accessible           = false
  multi_az                      = var.database.multi_az
  backup_retention_period       = 14
  copy_tags_to_snapshot         = true
  auto_minor_version_upgrade    = true
  deletion_protection           = !var.delete_runs_on_destroy
  skip_final_snapshot           = var.delete_runs_on_destroy
  final_snapshot_identifier     = var.delete_runs_on_destroy ? null : "${var.name}-last"
}

data "aws_iam_policy_document" "password" {
  statement {
    sid       = "ReadDatabasePassword"
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [aws_db_instance.this.master_user_secret[0].secret_arn]
  }
}

resource "aws_iam_role_policy" "password" {
  name   = "${var.name}-database-password"
  role   = var.role
  policy = data.aws_iam_policy_document.password.json
}

module "machine" {
  source             = "../machine"
  name               = "${var.name}-control"
  image_id           = var.image_id
  instance_type      = var.instance_type
  disk_gib           = var.disk_gib
  kms_key_arn        = var.kms_key_arn
  profile            = var.profile
  security_group_ids = [var.members_security_group_id, aws_security_group.control.id]
  subnet_id          = var.subnets[0].id
  user_data = join("\n", [var.driver_script, templatefile("${path.module}/control.sh.tftpl", {
    settings = var.settings
    store    = var.store_uri
    program  = file("${path.module}/control_secrets.py")
    arguments = join(" ", [
      aws_db_instance.this.endpoint, aws_db_instance.this.master_user_secret[0].secret_arn, var.prefect_secret,
    ])
  })])
  depends_on = [aws_iam_role_policy.password]
}
