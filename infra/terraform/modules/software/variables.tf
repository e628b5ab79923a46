variable "bucket" {
  description = "Bucket that machines fetch rollflow from."
  type        = string
  validation {
    condition     = length(var.bucket) > 2
    error_message = "Write the name of a bucket."
  }
}

variable "prefix" {
  description = "Prefix of the files in the bucket."
  type        = string
  default     = "software"
  validation {
    condition     = can(regex("^[A-Za-z0-9_-]+$", var.prefix))
    error_message = "Write one word of letters, digits, _ and -."
  }
}

variable "wheel" {
  description = "rollflow's wheel, a local file: pip wheel --no-deps --wheel-dir dist ."
  type        = string
  validation {
    condition     = endswith(var.wheel, ".whl") && fileexists(var.wheel)
    error_message = "There is no such wheel. Build it at the root of the repository: pip wheel --no-deps --wheel-dir dist ."
  }
}

variable "pins" {
  description = "Pinned versions that machines install, a local file in pip's format."
  type        = string
  validation {
    condition     = fileexists(var.pins)
    error_message = "There is no such file. The repository has some in infra/."
  }
}
