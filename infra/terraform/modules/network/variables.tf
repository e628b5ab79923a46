variable "name" {
  description = "Name of the deployment. The names of its resources begin with this name."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,23}$", var.name))
    error_message = "A name has 2 to 24 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "cidr" {
  description = "Addresses of the VPC. Each private subnet gets a sixteenth of them."
  type        = string
  default     = "10.42.0.0/16"
  validation {
    condition     = can(cidrsubnet(var.cidr, 4, 0)) && try(tonumber(split("/", var.cidr)[1]) >= 16 && tonumber(split("/", var.cidr)[1]) <= 23, false)
    error_message = "Write a block of /16 to /23, such as 10.42.0.0/16."
  }
}

variable "zones" {
  description = "Availability zones with a private subnet. A database needs two; more zones mean more spot capacity."
  type        = number
  default     = 2
  validation {
    condition     = contains([1, 2, 3], var.zones)
    error_message = "Write 1, 2 or 3."
  }
}
