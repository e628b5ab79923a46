output "address" {
  description = "Address of the head: cluster.address of a recipe."
  value       = local.address
}

output "driver_script" {
  description = "User data of a machine that joins the Ray cluster without offering CPUs or GPUs. Supervisors run there."
  value       = local.scripts["driver"]
}

output "head" {
  description = "Id of the head."
  value       = module.head.id
}
