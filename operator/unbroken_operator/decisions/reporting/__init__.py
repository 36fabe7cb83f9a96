"""What people are told of a job: status, conditions and Events. Nothing here changes what is done."""
