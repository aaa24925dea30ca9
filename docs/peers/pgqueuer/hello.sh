# in one terminal
pgq install
pgq run hello:main
# in another
pgq queue greet world
