output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "subnets" {
  description = "Private subnets in the order of their zones: id and addresses. Their machines can reach the internet."
  value       = [for zone in local.zones : { id = aws_subnet.private[zone].id, cidr = aws_subnet.private[zone].cidr_block }]
  depends_on  = [aws_route.nat, aws_route_table_association.private, aws_vpc_endpoint.s3]
}

output "members_security_group_id" {
  description = "Security group of every machine."
  value       = aws_security_group.members.id
}
