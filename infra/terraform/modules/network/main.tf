# A VPC in which nothing is reachable from the internet. Machines are in private subnets, and reach the internet through
# one NAT gateway, and S3 through a gateway endpoint, which costs nothing.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 6.0" }
  }
}

data "aws_region" "here" {}

data "aws_availability_zones" "here" {
  state = "available"
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

locals {
  zones = slice(data.aws_availability_zones.here.names, 0, var.zones)
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# The default security group of a new VPC allows traffic among its members and to everybody. Its rules are removed here.
resource "aws_default_security_group" "none" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-unused" }
}

resource "aws_subnet" "private" {
  for_each                = { for index, zone in local.zones : zone => index }
  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, each.value)
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-private-${each.key}" }
}

# Only the NAT gateway uses the last sixteenth of the addresses.
resource "aws_subnet" "outgoing" {
  vpc_id                  = aws_vpc.this.id
  availability_zone       = local.zones[0]
  cidr_block              = cidrsubnet(var.cidr, 4, 15)
  map_public_ip_on_launch = false
  tags                    = { Name = "${var.name}-outgoing" }
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = var.name }
}

resource "aws_eip" "nat" {
  domain     = "vpc"
  tags       = { Name = "${var.name}-nat" }
  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.outgoing.id
  tags          = { Name = var.name }
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route_table" "outgoing" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-outgoing" }
}

resource "aws_route" "internet" {
  route_table_id         = aws_route_table.outgoing.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "outgoing" {
  subnet_id      = aws_subnet.outgoing.id
  route_table_id = aws_route_table.outgoing.id
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route" "nat" {
  route_table_id         = aws_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this.id
}

resource "aws_route_table_association" "private" {
  for_each       = aws_subnet.private
  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.here.name}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private.id]
  tags              = { Name = "${var.name}-s3" }
}

# Every machine of the deployment is a member of this security group. Members reach each other on all ports that are not
# privileged, because Ray, torch.distributed and NCCL choose their ports. Nobody else reaches the members. Users log in
# by Session Manager, which needs no open port.
resource "aws_security_group" "members" {
  name        = "${var.name}-members"
  description = "Machines of ${var.name}: they reach each other, and HTTPS outside"
  vpc_id      = aws_vpc.this.id
  tags        = { Name = "${var.name}-members" }
}

resource "aws_vpc_security_group_ingress_rule" "members" {
  security_group_id            = aws_security_group.members.id
  description                  = "from members"
  referenced_security_group_id = aws_security_group.members.id
  ip_protocol                  = "tcp"
  from_port                    = 1024
  to_port                      = 65535
  tags                         = { Name = "${var.name}-from-members" }
}

resource "aws_vpc_security_group_egress_rule" "members" {
  security_group_id            = aws_security_group.members.id
  description                  = "to members"
  referenced_security_group_id = aws_security_group.members.id
  ip_protocol                  = "tcp"
  from_port                    = 1024
  to_port                      = 65535
  tags                         = { Name = "${var.name}-to-members" }
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.members.id
  description       = "HTTPS: AWS, package index, model hub"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  tags              = { Name = "${var.name}-https" }
}
