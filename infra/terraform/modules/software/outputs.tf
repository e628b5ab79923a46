output "install_script" {
  description = "Shell script (the first part of a machine's user data) that installs rollflow into /opt/rollflow."
  value = templatefile("${path.module}/install.sh.tftpl", {
    wheel = "s3://${var.bucket}/${aws_s3_object.wheel.key}"
    pins  = "s3://${var.bucket}/${aws_s3_object.pins.key}"
  })
}
